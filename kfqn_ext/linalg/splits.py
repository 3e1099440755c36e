"""How the damping λ of a layer's block is shared by its two factors: λ ↦ (λ_A, λ_G), mostly with λ_A λ_G = λ.

A split is a function of λ and a :class:`Balance`. One that reads ``balance.traces`` says so by
:func:`needs_traces`, since somebody has to measure them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Balance", "Given", "Split", "equal", "needs_traces", "relative", "spatial", "trace"]


@dataclass(frozen=True)
class Balance:
    """What is known of the sizes of a layer's two factors.

    Attributes:
        num_locations: |T|.
        trace_A: Mean eigenvalue tr(A) / d_in, [*B], or None where nothing measures it.
        trace_G: Mean eigenvalue tr(Γ) / d_out, [*B], or None.
    """

    num_locations: float
    trace_A: Tensor | None = None
    trace_G: Tensor | None = None

    @property
    def traces(self) -> tuple[Tensor, Tensor]:
        """Both mean eigenvalues.

        Raises:
            ValueError: Where they were not measured.
        """
        if self.trace_A is None or self.trace_G is None:
            raise ValueError(
                "This split of the damping reads the traces of A and Γ, and nothing measures them. Declare it: "
                "@needs_traces of kfqn_ext.linalg.splits above its function, or needs_traces(f)."
            )
        return self.trace_A, self.trace_G


Split = Callable[[float, Balance], tuple[float | Tensor, float | Tensor]]
_S = TypeVar("_S", bound=Callable[..., Any])


def needs_traces(split: _S) -> _S:
    """Declare that a split reads ``balance.traces``; ``functools.wraps`` hands it on to a wrapper.

    Args:
        split: The split.

    Returns:
        The same split.
    """
    split.needs_traces = True  # type: ignore[attr-defined]
    return split


def reads_traces(split: Split) -> bool:
    """Whether a split has declared that it reads the traces."""
    return bool(getattr(split, "needs_traces", False))


def spatial(damping: float, balance: Balance) -> tuple[float | Tensor, float | Tensor]:
    """λ_A = √|T| √λ and λ_G = √λ / √|T|, ``algo_8``: as if both factors were sums over √|T| locations.

    The reasons are in ``sec_12`` and ``sec_18``.

    Args:
        damping: λ.
        balance: What is known of the sizes of the layer's two factors.

    Returns:
        (λ_A, λ_G).
    """
    T = balance.num_locations
    return (damping * T) ** 0.5, (damping / T) ** 0.5


def equal(damping: float, balance: Balance) -> tuple[float | Tensor, float | Tensor]:
    """λ_A = λ_G = √λ, as K-BFGS-20 splits it; π = 1 for KFAC.

    Args:
        damping: λ.
        balance: Is not read.

    Returns:
        (λ_A, λ_G).
    """
    return damping**0.5, damping**0.5


@needs_traces
def trace(damping: float, balance: Balance) -> tuple[float | Tensor, float | Tensor]:
    """λ_A = π √λ and λ_G = √λ / π with π² = (tr(A) / d_in) / (tr(Γ) / d_out), ``line_11`` of ``algo_1``.

    π is held between 10⁻³ and 10³: a factor that is zero says nothing about the other.

    Args:
        damping: λ.
        balance: What is known of the sizes of the layer's two factors, the traces among it.

    Returns:
        (λ_A, λ_G), [*B] each.
    """
    trace_A, trace_G = balance.traces
    tiny = torch.finfo(trace_A.dtype).tiny
    pi = (trace_A.clamp(min=tiny) / trace_G.clamp(min=tiny)).sqrt().clamp(1e-3, 1e3)
    return pi * damping**0.5, damping**0.5 / pi


LARGE_EPSILON = 3.0
"""Above it a damping in units of the mean eigenvalue was hardly meant as one."""


def is_relative(split: Split) -> bool:
    """Whether a split takes ε, in units of each factor's mean eigenvalue, and no λ in units of the loss."""
    return getattr(split, "__wrapped__", split) is relative


def known_trace(trace: Tensor) -> Tensor:
    """A factor's mean eigenvalue; 1 where it is so small that neither a product nor an inverse stays in the range.

    Behind a layer of zeros the first gradients are zero; an H_G that started from their trace would dwarf whatever
    comes.
    """
    return torch.where(trace > torch.finfo(trace.dtype).tiny ** 0.5, trace, 1.0)


@needs_traces
def relative(damping: float, balance: Balance) -> tuple[float | Tensor, float | Tensor]:
    """λ_A = ε tr(A) / d_in and λ_G = ε tr(Γ) / d_out, with ε the damping: in units of each factor's mean eigenvalue.

    ε has no unit, and means the same for every layer. It does for every unit of the loss where H_G inverts Γ. An H_G of
    K-BFGS inverts a Hessian, in units of the loss, and Γ of the data's targets has their square: there the loss's unit
    matters a little. λ_A λ_G is no λ of the paper's.

    Args:
        damping: ε.
        balance: What is known of the sizes of the layer's two factors, the traces among it.

    Returns:
        (λ_A, λ_G), [*B] each.
    """
    known_A, known_G = (known_trace(trace) for trace in balance.traces)
    return damping * known_A, damping * known_G


@dataclass(frozen=True)
class Given:
    """λ_A and λ_G as numbers of their own, as in ``algo_7``.

    Attributes:
        damping_A: λ_A.
        damping_G: λ_G.
    """

    damping_A: float
    damping_G: float

    def __call__(self, damping: float, balance: Balance) -> tuple[float | Tensor, float | Tensor]:
        """Return (λ_A, λ_G)."""
        return self.damping_A, self.damping_G
