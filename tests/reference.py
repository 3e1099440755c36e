"""Dense, slow, obvious twins of the paper's algorithms: the oracle of the tests.

Everything is written from the paper, with explicit patches and explicit matrices, and shares no code with the
package. Use it with float64 models on the CPU; the optimizers change the model that they are given, so hand over
a deep copy. The loss is a mean over data. A convolution with G > 1 channel groups is G independent blocks: its
tensors have a leading dimension [G], written *B below, which is absent for every other layer.

Symbols: a patch a_t [d_in] (homogeneous 1 last where the layer has a bias), h_t = W a_t [d_out], W = [weight, bias]
[*B, d_out, d_in], g the gradient of the mean loss with respect to the layer's output, n data, t locations, |T|
the number of locations. Labels such as algo_8 are the paper's LaTeX labels.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# --- A layer is h_t = W a_t


def _pad_amounts(module: Any) -> list[tuple[int, int]]:
    """(left, right) padding of every spatial dimension; 'same' puts the odd one on the right, as torch does."""
    if module.padding == "valid":
        return [(0, 0) for _ in module.kernel_size]
    if module.padding == "same":
        totals = [d * (k - 1) for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in module.padding]


def _pad(module: Any, x: Tensor) -> Tensor:
    """The input after padding is added (the a_{j,t} of eq_12), [n, channels, *padded sizes]."""
    for dim, (left, right) in enumerate(_pad_amounts(module), start=2):
        length = x.shape[dim]
        i = torch.arange(-left, length + right)  # where each padded position lies in the unpadded input
        inside = (i >= 0) & (i < length)
        if module.padding_mode == "circular":
            source = i % length
        elif module.padding_mode == "reflect":  # mirror at 0, then at length - 1
            source = (length - 1) - ((length - 1) - i.abs()).abs()
        else:  # "replicate", and "zeros", where everything outside is overwritten below
            source = i.clamp(0, length - 1)
        x = x.index_select(dim, source)
        if module.padding_mode == "zeros":
            x = x * inside.to(x.dtype).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return x


def patches(module: nn.Module, x: Tensor) -> Tensor:
    """The vectors a_t(n) above thm_4 (one per location of the layer's output), [n, t, *B, d_in].

    Conv: the input entries under the kernel, channel-major as in ``weight.flatten(1)``. Linear: the input's last
    dimension; leading dimensions after the first are the locations. An unbatched input is one datum.
    """
    if isinstance(module, nn.Linear):
        x = x.unsqueeze(0) if x.ndim == 1 else x
        a = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        x = x.unsqueeze(0) if x.ndim == len(module.kernel_size) + 1 else x
        x = _pad(module, x)
        n, channels, groups = x.shape[0], x.shape[1], module.groups
        geometry = list(zip(x.shape[2:], module.kernel_size, module.dilation, module.stride, strict=True))
        sizes = [(length - d * (k - 1) - 1) // s + 1 for length, k, d, s in geometry]
        columns = []
        for delta in itertools.product(*[range(k) for k in module.kernel_size]):  # the offsets δ ∈ Δ of eq_12
            window: list[slice] = [slice(None), slice(None)]
            for offset, size, (_, _, d, s) in zip(delta, sizes, geometry, strict=True):
                window.append(slice(offset * d, offset * d + (size - 1) * s + 1, s))
            columns.append(x[tuple(window)])  # [n, channels, *sizes]
        a = torch.stack(columns, dim=2).flatten(3)  # [n, channels, |Δ|, t]
        a = a.reshape(n, groups, channels // groups * len(columns), a.shape[-1]).permute(0, 3, 1, 2)
        a = a.squeeze(2) if groups == 1 else a
    else:
        raise TypeError(f"not a supported layer: {module}")
    return a if module.bias is None else torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)


def outputs(module: nn.Module, h: Tensor) -> Tensor:
    """The vectors h_t(n) above thm_4 of an output h of the layer, or of a gradient like it, [n, t, *B, d_out]."""
    if isinstance(module, nn.Linear):
        h = h.unsqueeze(0) if h.ndim == 1 else h
        return h.reshape(h.shape[0], math.prod(h.shape[1:-1]), h.shape[-1])
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    h = h.unsqueeze(0) if h.ndim == len(module.kernel_size) + 1 else h
    n, channels, groups = h.shape[0], h.shape[1], module.groups
    h = h.flatten(2).reshape(n, groups, channels // groups, -1).permute(0, 3, 1, 2)
    return h.squeeze(2) if groups == 1 else h


def bound_sum_abs(module: Any, g: Tensor) -> Tensor:
    """Σ_n Σ_t |g|; for a convolution Σ_n √|T| ‖g_n‖, which is not less."""
    by_location = outputs(module, g.double())
    absolute = by_location.abs().sum((0, 1))
    if isinstance(module, nn.Linear):
        return absolute
    bound = math.sqrt(by_location.shape[1]) * by_location.square().sum(1).sqrt().sum(0)
    assert (bound >= (1 - 1e-12) * absolute).all()
    return bound


def as_matrix(module: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W = [weight, bias] (eq_19), for the parameters or anything of their shapes, [*B, d_out, d_in]."""
    groups = getattr(module, "groups", 1)
    W = weight.flatten(1)
    if bias is not None:
        W = torch.cat([W, bias[:, None]], dim=1)
    return W if groups == 1 else W.reshape(groups, W.shape[0] // groups, W.shape[1])


def weight_matrix(module: Any) -> Tensor:
    """The layer's W of eq_19, a copy, [*B, d_out, d_in]."""
    bias = None if module.bias is None else module.bias.detach()
    return as_matrix(module, module.weight.detach(), bias).clone()


@torch.no_grad()
def set_weight_matrix(module: Any, W: Tensor) -> None:
    """Write W of eq_19, [*B, d_out, d_in], into the layer's weight and bias."""
    if module.bias is not None:
        module.bias.copy_(W[..., -1].reshape(module.bias.shape))
        W = W[..., :-1]
    module.weight.copy_(W.reshape(module.weight.shape))


# --- One forward-backward pass


class Layer:
    """What one layer saw in a pass, as vectors a [n, t, *B, d_in], h and g [n, t, *B, d_out], and what follows."""

    def __init__(self, module: nn.Module, x: Tensor, h: Tensor, g: Tensor) -> None:
        """From the layer's input, its output, and the mean loss's gradient by its output (1/N of 𝒟h(n))."""
        self.module, self.a, self.h, self.g = module, patches(module, x), outputs(module, h), outputs(module, g)
        n, t = self.num_data, self.num_locations = self.a.shape[0], self.a.shape[1]  # n, |T|
        self.a_bar = self.a.sum(dim=(0, 1)) / (n * t)  # E_n[mean_t a_t] (below eq_1), [*B, d_in]
        self.h_bar = self.h.sum(dim=(0, 1)) / (n * t)  # E_n[mean_t h_t] (eq_6), [*B, d_out]
        self.dh_bar = self.g.sum(dim=(0, 1)) / t  # E_n[mean_t 𝒟h_t] (eq_7), [*B, d_out]; 1/N is already in g
        self.A = torch.einsum("nt...i,nt...j->...ij", self.a, self.a) / n  # E_n[Σ_t a_t a_tᵀ] (eq_8), Ω of algo_1
        self.DW = torch.einsum("nt...i,nt...j->...ij", self.g, self.a)  # Σ_{n,t} g aᵀ (thm_4 i), [*B, d_out, d_in]
        Dh = n * self.g  # one datum's gradients 𝒟h_t(n)
        self.Gamma = torch.einsum("nt...i,nt...j->...ij", Dh, Dh) / (n * t)  # E_n[mean_t 𝒟h_t 𝒟h_tᵀ] (algo_1)


@dataclass
class Pass:
    """One forward-backward pass: layers by module name, and gradients of all parameters by parameter name."""

    loss: Tensor
    output: Tensor
    layers: dict[str, Layer]
    grads: dict[str, Tensor]


LossFn = Callable[[Any, Any], Tensor]


def capture(model: nn.Module, loss_fn: LossFn, x: Any, y: Any) -> Pass:
    """One forward-backward pass over a minibatch ("forward-backward pass over M_k" in algo_8, algo_7, algo_1).

    Each supported layer whose parameters are all trainable gets a zero added to its output; the gradient with
    respect to that zero is the gradient with respect to the output. ``y`` may be a function of the model's output
    (targets sampled from the predictive distribution). A layer may be called once; ``.grad`` is not touched.
    """
    seen: dict[str, tuple[nn.Module, Tensor, Tensor, Tensor]] = {}

    def hook(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if name in seen:
            raise RuntimeError(f"{name} is called twice in one pass, which the reference does not cover")
        zero = torch.zeros_like(output, requires_grad=True)
        seen[name] = (module, inputs[0].detach().clone(), output.detach().clone(), zero)
        return output + zero

    handles = [
        module.register_forward_hook(functools.partial(hook, name))
        for name, module in model.named_modules()
        if isinstance(module, LAYERS) and all(p.requires_grad for p in module.parameters())
    ]
    try:
        with torch.enable_grad():
            output = model(x)
            target = y(output.detach()) if callable(y) else y
            loss = loss_fn(output, target)
    finally:
        for handle in handles:
            handle.remove()

    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    zeros = [zero for _, _, _, zero in seen.values()]
    grads = torch.autograd.grad(loss, [*zeros, *parameters.values()], allow_unused=True)
    layers = {
        name: Layer(module, x_, h, g)
        for (name, (module, x_, h, _)), g in zip(seen.items(), grads, strict=False)
        if g is not None
    }
    by_name = {n: g for n, g in zip(parameters, grads[len(zeros) :], strict=True) if g is not None}
    return Pass(loss.detach(), output.detach(), layers, by_name)


def replay(model: nn.Module, loss_fn: LossFn, x: Any, y: Any, rng_state: Tensor) -> Pass:
    """Another pass over the same minibatch, with the first pass's random numbers; it leaves the buffers alone."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    torch.set_rng_state(rng_state)  # the same draws as in the first pass, hence the same state after them
    second = capture(model, loss_fn, x, y)
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
    return second


# --- BFGS and damping, for one block; over_blocks repeats a function for each of the G blocks


def over_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``function`` for every block of its tensor arguments [*B, d] and [*B, d, d] and stack the results."""

    @functools.wraps(function)
    def blockwise(*args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        if min(a.ndim for a in tensors) == 1:  # s is one vector: *B is absent
            return function(*args)
        blocks = [[a[b] if isinstance(a, Tensor) else a for a in args] for b in range(len(tensors[0]))]
        results = [function(*block) for block in blocks]
        if isinstance(results[0], tuple):
            return tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return torch.stack(results)

    return blockwise


@over_blocks
def bfgs(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """H⁺ = (I − ρ s yᵀ) H (I − ρ y sᵀ) + ρ s sᵀ with ρ = 1 / yᵀs (eq_13)."""
    identity = torch.eye(len(s), dtype=H.dtype)
    rho = 1 / (y @ s)
    return (identity - rho * torch.outer(s, y)) @ H @ (identity - rho * torch.outer(y, s)) + rho * torch.outer(s, s)


def lbfgs(H0: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The L-BFGS matrix: eq_23's recursion over the pairs, oldest first, from H0."""
    for s, y in pairs:
        H0 = bfgs(H0, s, y)
    return H0


@over_blocks
def powell(s: Tensor, y: Tensor, H: Tensor, mu1: float) -> Tensor:
    """Powell's damping on H, the first half of algo_5: s̃ with s̃ᵀy ≥ μ₁ yᵀHy."""
    sy, yHy = s @ y, y @ H @ y
    theta1 = (1 - mu1) * yHy / (yHy - sy) if sy < mu1 * yHy else 1.0
    return theta1 * s + (1 - theta1) * (H @ y)


@over_blocks
def powell_lm(s: Tensor, y: Tensor, H: Tensor, mu1: float, mu2: float) -> tuple[Tensor, Tensor]:
    """D_P D_LM (algo_5): Powell's damping on H, then Levenberg-Marquardt damping ỹ = y + μ₂ s̃."""
    s_tilde = powell(s, y, H, mu1)
    return s_tilde, y + mu2 * s_tilde


@over_blocks
def powell_identity_lm(s: Tensor, y: Tensor, mu1: float, mu2: float) -> tuple[Tensor, Tensor]:
    """D_P(I) D_LM (algo_6): algo_5 with H = μ₂⁻¹ I."""
    sy, yy = s @ y, y @ y
    theta1 = (1 - mu1) * (yy / mu2) / (yy / mu2 - sy) if sy < mu1 * (yy / mu2) else 1.0
    s_tilde = theta1 * s + (1 - theta1) * y / mu2
    return s_tilde, y + mu2 * s_tilde


@over_blocks
def double_damping_2020(s: Tensor, y: Tensor, H: Tensor, mu1: float, mu2: float) -> tuple[Tensor, Tensor]:
    """The double damping of goldfarb2020practical (0 < μ₂ ≤ 1): Powell on H, then Powell with B = I, s̃ᵀỹ ≥ μ₂ s̃ᵀs̃."""
    s_tilde = powell(s, y, H, mu1)
    sy, ss = s_tilde @ y, s_tilde @ s_tilde
    theta2 = (1 - mu2) * ss / (ss - sy) if sy < mu2 * ss else 1.0
    return s_tilde, theta2 * y + (1 - theta2) * s_tilde


def damped_inverse(A: Tensor, damping: float | Tensor) -> Tensor:
    """(A + damping I)⁻¹, the initialisation of H_A in algo_8; damping is a number or one per block [*B]."""
    identity = torch.eye(A.shape[-1], dtype=A.dtype)
    inverse: Tensor = torch.linalg.inv(A + torch.as_tensor(damping, dtype=A.dtype)[..., None, None] * identity)
    return inverse


# --- The optimizers
Split = Callable[[float, int], tuple[float, float]]
SPLITS: dict[str, Split] = {  # (λ, |T|) ↦ (λ_A, λ_G)
    "spatial": lambda damping, T: (math.sqrt(T) * math.sqrt(damping), math.sqrt(damping) / math.sqrt(T)),
    "equal": lambda damping, T: (math.sqrt(damping), math.sqrt(damping)),
}


@dataclass
class LayerState:
    """The state of one layer: M the momentum (hat DW), p the last direction, both [*B, d_out, d_in]; the rest below."""

    M: Tensor
    H_A: Tensor
    H_G: Tensor
    A: Tensor  # the A of the last curvature update; KFAC: Ω
    p: Any = None
    lambda_A: float = math.nan
    lambda_G: float = math.nan
    H_G0: Any = None  # where H_G starts, and every L-BFGS recursion
    s_G: Any = 0.0  # moving averages before damping
    y_G: Any = 0.0
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # damped, oldest first
    Gamma: Any = None


@dataclass
class _Reference:
    """What algo_8, algo_7 and algo_1 share: M = βM + 𝒟W, p = H_G M H_A, W = W − α (p + γ W) (sec_5)."""

    model: nn.Module
    loss_fn: LossFn
    lr: float  # α
    damping: float  # λ
    weight_decay: float = field(default=0.0, kw_only=True)  # γ
    vector_decay: float | None = field(default=None, kw_only=True)  # γ of biases and other vectors; None: as all
    momentum: float = field(default=0.9, kw_only=True)  # β of the gradient
    beta: float = field(default=0.9, kw_only=True)  # β of every other moving average
    k: int = field(default=0, init=False)
    state: dict[str, LayerState] = field(default_factory=dict, init=False)  # by module name
    other: dict[str, Tensor] = field(default_factory=dict, init=False)  # momentum by parameter name

    @torch.no_grad()
    def descend(self, first: Pass, other_rate: float) -> None:
        """Lines line_12 to line_13 of algo_8 with sec_5's weight decay; other parameters move along their momentum."""
        for name, layer in first.layers.items():
            st = self.state[name]
            st.M = self.momentum * st.M + layer.DW
            st.p = st.H_G @ st.M @ st.H_A
            W = weight_matrix(layer.module)
            set_weight_matrix(layer.module, W - self.lr * (self.scale(name, layer) * st.p + self.decayed(layer.module)))
        in_layers = {id(p) for layer in first.layers.values() for p in layer.module.parameters()}
        for name, theta in self.model.named_parameters():
            if id(theta) not in in_layers and name in first.grads:
                step = self.other_step(name, first.grads[name], other_rate)
                theta.copy_(theta - self.lr * (step + self.decay_of(theta) * theta))

    def decay_of(self, theta: Tensor) -> float:
        """γ of a parameter."""
        return self.weight_decay if self.vector_decay is None or theta.ndim > 1 else self.vector_decay

    def decayed(self, module: Any) -> Tensor:
        """γ W, where γ may be another for the last column of W = [weight, bias]."""
        parts = (None if theta is None else self.decay_of(theta) * theta for theta in (module.weight, module.bias))
        return as_matrix(module, *parts)

    def scale(self, name: str, layer: Layer) -> float:
        """What a layer's p is multiplied with, beside α: nothing in the paper."""
        return 1.0

    def other_step(self, name: str, grad: Tensor, rate: float) -> Tensor:
        """The step of a parameter outside the layers, over α: its momentum at a rate, as in sec_18."""
        self.other[name] = self.momentum * self.other.get(name, torch.zeros_like(grad)) + grad
        return rate * self.other[name]


@dataclass
class ReferenceKBFGS(_Reference):
    """K-BFGS and, with ``memory`` = p, K-BFGS(L) (algo_8); with changed cells the other rows of table_8.

    K-BFGS-20: ``pair_damping="2020", moving_A=True, split="equal", H_G0="identity"``.
    """

    _: KW_ONLY
    T: int = 1
    A0: Mapping[str, Tensor] | None = None  # warm start by module name; None: the first minibatch's
    memory: int | None = None  # p of L-BFGS for H_G; None: dense BFGS
    pair_damping: str = "algo_5"  # or "algo_6", both with μ₂ = λ_G; or "2020" with μ₂ = min(λ_G, 1): #1 off
    moving_A: bool = False  # A ← βA + (1−β)A_minibatch at every curvature update, before A is used: #2 off
    split: str | Split = "spatial"  # or "equal", or a function (λ, |T|) -> (λ_A, λ_G)
    H_G0: str = "lambda"  # H_G starts from λ_G⁻¹ I; or "identity"
    frozen_G: Collection[str] = ()  # modules that keep H_G = H_G0 (a layer before BatchNorm: y_G is rounding noise)
    mu1: float = 0.2

    def step(self, x: Any, y: Any) -> Tensor:
        """One iteration of algo_8 on the minibatch; returns the first pass's loss."""
        self.k += 1
        rng_state = torch.get_rng_state()
        first = capture(self.model, self.loss_fn, x, y)
        if self.k == 1:
            for name, layer in first.layers.items():
                self.state[name] = self.initial(layer, layer.A if self.A0 is None else self.A0[name])
        self.descend(first, other_rate=1 / self.damping)
        if self.k % self.T == 0:
            second = replay(self.model, self.loss_fn, x, y, rng_state)
            for name, layer in first.layers.items():
                self.update_H_A(self.state[name], layer)
                if name not in self.frozen_G:
                    self.update_H_G(self.state[name], layer, second.layers[name])
        return first.loss

    def initial(self, layer: Layer, A: Tensor) -> LayerState:
        """The line "Initialization" of algo_8."""
        split = SPLITS[self.split] if isinstance(self.split, str) else self.split
        lambda_A, lambda_G = split(self.damping, layer.num_locations)
        identity = torch.eye(layer.h.shape[-1], dtype=A.dtype).expand(*A.shape[:-2], -1, -1)
        H_G0 = {"lambda": identity / lambda_G, "identity": identity}[self.H_G0]
        H_A = damped_inverse(A, lambda_A)
        return LayerState(torch.zeros_like(layer.DW), H_A, H_G0, A, None, lambda_A, lambda_G, H_G0)

    def update_H_A(self, st: LayerState, layer: Layer) -> None:
        """Hessian-action BFGS (eq_1): s_A = H_A ā, y_A = A s_A + λ_A s_A, with ā and A of the first pass."""
        st.A = self.beta * st.A + (1 - self.beta) * layer.A if self.moving_A else layer.A
        s_A = torch.einsum("...ij,...j->...i", st.H_A, layer.a_bar)
        y_A = torch.einsum("...ij,...j->...i", st.A, s_A) + st.lambda_A * s_A
        st.H_A = bfgs(st.H_A, s_A, y_A)

    def update_H_G(self, st: LayerState, first: Layer, second: Layer) -> None:
        """Moving averages of eq_6 and eq_7, damping, then BFGS or L-BFGS (algo_8)."""
        st.s_G = self.beta * st.s_G + (1 - self.beta) * (second.h_bar - first.h_bar)
        st.y_G = self.beta * st.y_G + (1 - self.beta) * (second.dh_bar - first.dh_bar)
        if self.pair_damping == "algo_5":
            s, y = powell_lm(st.s_G, st.y_G, st.H_G, self.mu1, st.lambda_G)
        elif self.pair_damping == "algo_6":
            s, y = powell_identity_lm(st.s_G, st.y_G, self.mu1, st.lambda_G)
        elif self.pair_damping == "2020":
            s, y = double_damping_2020(st.s_G, st.y_G, st.H_G, self.mu1, min(st.lambda_G, 1.0))
        else:
            raise ValueError(self.pair_damping)
        if self.memory is None:
            st.H_G = bfgs(st.H_G, s, y)
        else:
            st.pairs = [*st.pairs, (s, y)][-self.memory :]
            st.H_G = lbfgs(st.H_G0, st.pairs)


@dataclass
class ReferenceProvable(ReferenceKBFGS):
    """K-BFGS(L) with D_P(I) D_LM, exact inversion of the minibatch's A and no momentum (algo_7)."""

    _: KW_ONLY
    momentum: float = 0.0
    memory: int | None = 100
    pair_damping: str = "algo_6"

    def update_H_A(self, st: LayerState, layer: Layer) -> None:
        """H_A = (Â + λ_A I)⁻¹ with Â of the first pass (algo_7), used from the next direction on."""
        st.A = layer.A
        st.H_A = damped_inverse(st.A, st.lambda_A)


@dataclass
class ReferenceKFAC(_Reference):
    """KFAC (algo_1); H_A is its H_Ω, H_G its H_Γ, state's A its Ω.

    ``sample_targets`` (model output -> targets from the predictive distribution) is called once per statistics pass,
    and once before in the first step unless Omega0 and Gamma0 are both given.
    """

    _: KW_ONLY
    sample_targets: Callable[[Tensor], Any]
    T1: int = 1
    T2: int = 1
    order: str = "printed"  # step, statistics, inverses; or "statistics_first": statistics, inverses, step
    Omega0: Mapping[str, Tensor] | None = None  # warm start by module name; None: the first minibatch's
    Gamma0: Mapping[str, Tensor] | None = None

    def step(self, x: Any, y: Any) -> Tensor:
        """One iteration of algo_1 on the minibatch; returns the first pass's loss."""
        self.k += 1
        rng_state = torch.get_rng_state()
        first = capture(self.model, self.loss_fn, x, y)
        if self.k == 1:
            self.initialize(first, x, rng_state)
        if self.order == "statistics_first":
            self.update_curvature(x, rng_state)
        self.descend(first, other_rate=1.0)
        if self.order == "printed":
            self.update_curvature(x, rng_state)
        return first.loss

    def initialize(self, first: Pass, x: Any, rng_state: Tensor) -> None:
        """The line "Initialization" of algo_1, and the inverses of these factors."""
        sampled = first.layers
        if self.Omega0 is None or self.Gamma0 is None:
            sampled = replay(self.model, self.loss_fn, x, self.sample_targets, rng_state).layers
        for name, layer in sampled.items():
            Omega = layer.A if self.Omega0 is None else self.Omega0[name]
            Gamma = layer.Gamma if self.Gamma0 is None else self.Gamma0[name]
            H_A, H_G = self.inverses(Omega, Gamma)
            self.state[name] = LayerState(torch.zeros_like(layer.DW), H_A, H_G, Omega, Gamma=Gamma)

    def update_curvature(self, x: Any, rng_state: Tensor) -> None:
        """The two "if" blocks of algo_1: Ω and Γ when k ≡ 0 mod T₁, the inverses when k ≡ 0 mod T₂."""
        if self.k % self.T1 == 0:
            for name, layer in replay(self.model, self.loss_fn, x, self.sample_targets, rng_state).layers.items():
                st = self.state[name]
                st.A = self.beta * st.A + (1 - self.beta) * layer.A
                st.Gamma = self.beta * st.Gamma + (1 - self.beta) * layer.Gamma
        if self.k % self.T2 == 0:
            for st in self.state.values():
                st.H_A, st.H_G = self.inverses(st.A, st.Gamma)

    def inverses(self, Omega: Tensor, Gamma: Tensor) -> tuple[Tensor, Tensor]:
        """(Ω + π√λ I)⁻¹ and (Γ + √λ/π I)⁻¹ with π² = tr(Ω ⊗ I) / tr(I ⊗ Γ) (line_11), per block."""
        trace_Omega = Omega.diagonal(dim1=-2, dim2=-1).sum(-1) * Gamma.shape[-1]
        trace_Gamma = Gamma.diagonal(dim1=-2, dim2=-1).sum(-1) * Omega.shape[-1]
        pi = torch.sqrt(trace_Omega / trace_Gamma)
        return damped_inverse(Omega, pi * math.sqrt(self.damping)), damped_inverse(Gamma, math.sqrt(self.damping) / pi)
