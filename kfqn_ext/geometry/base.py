"""The one place that knows which modules are layers ``h_t = W a_t``, and what each kind must be able to do."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

from kfqn_ext._torch import is_attention_projection
from kfqn_ext.linalg import few_columns


@dataclass(frozen=True)
class LayerGeometry(ABC):
    """A layer that multiplies every patch ``a_t`` of its input with one matrix W, ``h_t = W a_t``: ``eq_12``.

    A kind of layer needs three methods: how its input is cut into patches, where its outputs are, and what has no
    batch dimension. All else follows from these, slowly; what a kind can do faster it overrides. Where a weight is not
    laid out as [out, in, ...], two more methods say how.

    Shapes: N data, T locations; [*B] is empty, or [G] for a layer of G > 1 channel groups, whose curvature is G
    independent blocks; d_in counts the homogeneous 1 of a layer with a bias, which comes last. A geometry holds
    numbers only, neither parameters nor the module.

    Attributes:
        d_in: Length of a patch a_t in one group.
        d_out: Length of an output h_t in one group.
        groups: G.
        has_bias: Whether a_t ends with a 1 and W with the bias.
    """

    d_in: int
    d_out: int
    groups: int
    has_bias: bool

    @property
    def blocks(self) -> tuple[int, ...]:
        """The batch shape *B, which is () or (G,)."""
        return (self.groups,) if self.groups > 1 else ()

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of W, [*B, d_out, d_in]."""
        return (*self.blocks, self.d_out, self.d_in)

    @property
    def inner(self) -> int:
        """Length of a patch without the homogeneous 1, which is how many columns of W are the weight's."""
        return self.d_in - self.has_bias

    # ------------------------------------------------------------------ what a kind of layer must say

    @abstractmethod
    def as_batch(self, x: Tensor) -> Tensor:
        """Give an input or output a batch dimension where it has none."""

    @abstractmethod
    def patches(self, x: Tensor) -> Tensor:
        """All a_t, written out: [N, T, *B, d_in]. T × d_in numbers for a datum; not for large inputs.

        Their entries are copied from the input, or zero, and the last one is the homogeneous 1.
        """

    @abstractmethod
    def outputs(self, g: Tensor) -> Tensor:
        """An output-shaped tensor by location: [N, T, *B, d_out]."""

    # ------------------------------------------------------------------ how a weight is laid out

    def to_matrix(self, weight: Tensor) -> Tensor:
        """A tensor shaped like the weight, [G · d_out, ...], as a matrix: [*B, d_out, d_in without the bias]."""
        return weight.reshape(*self.blocks, self.d_out, self.inner)

    def from_matrix(self, matrix: Tensor, shape: Sequence[int]) -> Tensor:
        """Undo :meth:`to_matrix`; a view of the matrix, also where that is columns of a W."""
        return matrix if matrix.shape == shape else matrix.view(*shape)

    # ------------------------------------------------------------------ W = [weight, bias]

    def write_matrix(self, W: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Copy tensors shaped like the layer's parameters into W, [*B, d_out, d_in], and return it."""
        W[..., : self.inner].copy_(self.to_matrix(weight))
        if self.has_bias and bias is not None:
            W[..., self.inner].copy_(bias.reshape(*self.blocks, self.d_out))
        return W

    def matrix(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Join tensors shaped like the layer's parameters to W = [weight, bias], ``eq_19``: [*B, d_out, d_in]."""
        return self.write_matrix(weight.new_zeros(self.matrix_shape), weight, bias)

    def columns(self, W: Tensor, weight_shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Split W, [*B, d_out, d_in], into views shaped like the weight and like the bias (None without one).

        They share W's memory: what is written to them in place is written to W. A W that has no such views, as one
        whose blocks are not contiguous may have none, is a RuntimeError, and is never copied.
        """
        weight = self.from_matrix(W[..., : self.inner], weight_shape)
        if not self.has_bias:
            return weight, None
        bias = W[..., self.inner]
        return weight, bias if bias.ndim == 1 else bias.view(-1)

    def multiply(self, weight: Tensor, bias: Tensor | None, a: Tensor) -> Tensor:
        """W a for W = [weight, bias], which is not joined: [*B, d_in] → [*B, d_out]."""
        h = (self.to_matrix(weight) @ a[..., : self.inner].unsqueeze(-1)).squeeze(-1)
        return h if bias is None else h + bias.reshape(*self.blocks, self.d_out) * a[..., self.inner :]

    # ------------------------------------------------------------------ sums over data and locations

    def num_locations(self, g: Tensor) -> int:
        """|T|, read off a batched output."""
        return self.outputs(g).shape[1]

    def mean_patch(self, x: Tensor) -> Tensor:
        """ā = mean over data and locations of a_t: [*B, d_in]."""
        return self.patches(x).mean((0, 1))

    def gram_product(self, x: Tensor, s: Tensor) -> Tensor:
        """A s = (1/N) Σ_n Σ_t a_t a_tᵀ s, ``eq_14``, without forming A: [*B, d_in, k] → [*B, d_in, k]."""
        a = _rows(self.patches(x))
        return few_columns.gram_product(a, s) / x.shape[0]

    def gram(self, x: Tensor) -> Tensor:
        """A = (1/N) Σ_n Σ_t a_t a_tᵀ, ``eq_8``: [*B, d_in, d_in]."""
        a = _rows(self.patches(x))
        return (a.mT @ a).div_(x.shape[0])

    def trace(self, x: Tensor, num_locations: int) -> Tensor:
        """tr(A) = (1/N) Σ_n Σ_t ‖a_t‖², with T locations: [*B]."""
        # A patch of the batch mean of x² holds the mean squares of a patch of x. (A homogeneous 1 is its own square.)
        squares = x.square().mean(0, keepdim=True)  # a norm over the data costs a CPU ten times as much
        return self.mean_patch(squares).sum(-1) * num_locations

    def sum_outputs(self, g: Tensor) -> Tensor:
        """Σ_n Σ_t of an output-shaped tensor: [*B, d_out]."""
        return self.outputs(g).sum((0, 1))

    def bound_sum_abs(self, g: Tensor) -> Tensor:
        """A bound on Σ_n Σ_t |g| for an output-shaped tensor, at most √|T| times as large: [*B, d_out]."""
        return self.outputs(g).abs().sum((0, 1))

    def gram_outputs(self, g: Tensor) -> Tensor:
        """Σ_n Σ_t h_t h_tᵀ of an output-shaped tensor: [*B, d_out, d_out]."""
        h = _rows(self.outputs(g))
        return h.mT @ h

    def gram_outputs_product(self, g: Tensor, s: Tensor) -> Tensor:
        """The same matrix times s, without forming it: [*B, d_out, k] → [*B, d_out, k]."""
        h = _rows(self.outputs(g))
        return few_columns.gram_product(h, s)


def _rows(by_location: Tensor) -> Tensor:
    """[N, T, *B, d] → [*B, N · T, d]."""
    return by_location.flatten(0, 1).movedim(0, -2)


_Builder = Callable[[nn.Module], LayerGeometry]
_REGISTRY: dict[type[nn.Module], tuple[_Builder, tuple[str, ...]]] = {}


def register(kind: type[nn.Module], build: _Builder, methods: tuple[str, ...] = ("forward",)) -> None:
    """Teach the package a kind of layer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from kfqn_ext.geometry import LayerGeometry, geometry_of, register
        >>> class Transposed(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight, self.bias = nn.Parameter(torch.rand(3, 2)), nn.Parameter(torch.rand(2))
        ...     def forward(self, x):
        ...         return x @ self.weight + self.bias
        >>> class TransposedGeometry(LayerGeometry):
        ...     def as_batch(self, x):
        ...         return x if x.ndim > 1 else x.unsqueeze(0)
        ...     def patches(self, x):
        ...         return nn.functional.pad(self.outputs(x), (0, 1), value=1.0)
        ...     def outputs(self, g):
        ...         return g.unsqueeze(1).flatten(1, -2)
        ...     def to_matrix(self, weight):
        ...         return weight.mT
        ...     def from_matrix(self, matrix, shape):
        ...         return matrix.mT
        >>> register(Transposed, lambda m: TransposedGeometry(d_in=4, d_out=2, groups=1, has_bias=True))
        >>> geometry_of(Transposed()).matrix_shape
        (2, 4)

    Args:
        kind: Module class. Its instances need ``weight`` and, with a bias, ``bias``.
        build: Maps an instance to its geometry.
        methods: Methods that define what the layer computes. A subclass that overrides one of them is another
            function, and is refused.
    """
    _REGISTRY[kind] = (build, methods)


def _kind(module: nn.Module) -> type[nn.Module] | None:
    return next((kind for kind in type(module).__mro__ if kind in _REGISTRY), None)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is of a registered kind; it may still be refused, see :func:`refusal`.

    Args:
        module: A layer, or any other module.
    """
    return _kind(module) is not None


def refusal(module: nn.Module) -> str | None:
    """Say why a module of a registered kind can't be measured; None where it can.

    Nothing is read from ``module.weight`` before it is known to be a plain parameter: reading a parametrized
    weight runs its parametrization.

    Args:
        module: A layer, or any other module.
    """
    kind = _kind(module)
    if kind is None:
        return f"{type(module).__name__} is not a registered kind of layer"
    if is_attention_projection(module):
        return "its weight is used by MultiheadAttention without calling the layer"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized: the weight it multiplies with is not the one that is trained"
    methods = _REGISTRY[kind][1]
    overridden = [m for m in methods if m in vars(module) or getattr(type(module), m) is not getattr(kind, m)]
    if overridden:
        return f"it overrides {kind.__name__}.{overridden[0]}, so it may not compute h = W a"
    weight = module.weight
    if isinstance(weight, nn.UninitializedParameter):
        return "its lazy weight is not initialized; run one forward pass first"
    if not isinstance(weight, nn.Parameter) or not weight.is_leaf:
        return "its weight is computed from other tensors (old weight_norm or spectral_norm?)"
    if weight.is_complex():
        return "its weight is complex"
    return None


def geometry_of(module: nn.Module) -> LayerGeometry | None:
    """Describe a module as a layer ``h_t = W a_t``; None where it isn't one (:func:`refusal` says why).

    Args:
        module: A layer, or any other module.
    """
    kind = _kind(module)
    if kind is None or refusal(module) is not None:
        return None
    return _REGISTRY[kind][0](module)
