"""Dense twins of what the untuned rows have beside the paper's cells: relative damping, lengths that are set, AdamW."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests import reference as ref

GOLDEN = (1 + 5**0.5) / 2
FIRST, LATER = 9, 1  # power iterations of a layer's first step, and of every later one


def start_vectors(P: Tensor) -> Tensor:
    """A unit vector for each block of P, [*B, d_in], with entries sin(φ² i)."""
    u = torch.sin(GOLDEN**2 * torch.arange(1, P.shape[-1] + 1, dtype=P.dtype))
    return (u / u.norm()).expand(*P.shape[:-2], -1)


def power_iteration(P: Tensor, u: Tensor, times: int) -> tuple[float, Tensor]:
    """‖P‖₂ as the largest of ‖PᵀPu‖ / ‖Pu‖ over the blocks, and the last PᵀPu / ‖PᵀPu‖ of each."""
    pairs = [_one_block(P_, u_, times) for P_, u_ in zip(_blocks(P, 2), _blocks(u, 1), strict=True)]
    return max(norm for norm, _ in pairs), torch.stack([u_ for _, u_ in pairs]).reshape(u.shape)


def _blocks(x: Tensor, dims: int) -> Tensor:
    return x.reshape(-1, *x.shape[x.ndim - dims :])


def _one_block(P: Tensor, u: Tensor, times: int) -> tuple[float, Tensor]:
    norm = 0.0
    for _ in range(times):
        v = P @ u
        w = P.T @ v
        norm, u = float(w.norm() / v.norm()), w / w.norm()
    return norm, u


def weights(decay: float, k: int) -> Tensor:
    """Those of k values in a moving average that was started at zero and corrected for it: they sum to 1."""
    w = decay ** torch.arange(k - 1, -1, -1, dtype=torch.float64)
    return w / w.sum()


def signal_to_noise(gradients: list[Tensor], beta: float, decay: float = 0.95) -> float:
    """ρ = ‖mean of gradients‖ / √(mean of ‖g‖²), from all gradients so far."""
    k = len(gradients)
    mean = sum(w * g for w, g in zip(weights(beta, k), gradients, strict=True))
    square = sum(w * g.square().sum() for w, g in zip(weights(decay, k), gradients, strict=True))
    return min(1.0, float(torch.linalg.vector_norm(torch.as_tensor(mean)) / torch.as_tensor(square).sqrt()))


@dataclass
class Untuned(ref._Reference):
    """Steps ‖ΔW‖₂ = α √ρ max(1, √(d_out / d_in)), and other parameters by Adam at a tenth of α."""

    seen: dict[str, list[Tensor]] = field(default_factory=dict, init=False)  # gradients by layer, or parameter
    u: dict[str, Tensor] = field(default_factory=dict, init=False)
    M: dict[str, Tensor] = field(default_factory=dict, init=False)

    def scale(self, name: str, layer: ref.Layer) -> float:
        st: Any = self.state[name]
        P = st.p
        gradients = self.seen.setdefault(name, [])
        gradients.append(layer.DW)
        start, times = (self.u[name], LATER) if name in self.u else (start_vectors(P), FIRST)
        norm, u = power_iteration(P, start, times)
        st.u = self.u.get(name, u)  # what the pass before this step knew
        self.u[name] = u
        st.M_before = self.M.get(name, st.M)
        self.M[name] = st.M
        wanted = max(1.0, (P.shape[-2] / P.shape[-1]) ** 0.5)
        return wanted * signal_to_noise(gradients, self.momentum) ** 0.5 / norm

    def other_step(self, name: str, grad: Tensor, rate: float) -> Tensor:
        gradients = self.seen.setdefault(name, [])
        gradients.append(grad)
        k = len(gradients)
        m = sum(w * g for w, g in zip(weights(self.momentum, k), gradients, strict=True))
        v = sum(w * g.square() for w, g in zip(weights(0.999, k), gradients, strict=True))
        return 0.1 * torch.as_tensor(m) / (torch.as_tensor(v).sqrt() + 1e-8)


@dataclass
class UntunedKFAC(Untuned, ref.ReferenceKFAC):
    """KFAC with λ in units of each factor's mean eigenvalue."""

    def inverses(self, Omega: Tensor, Gamma: Tensor) -> Any:
        return tuple(
            ref.damped_inverse(factor, self.damping * factor.diagonal(dim1=-2, dim2=-1).mean(-1))
            for factor in (Omega, Gamma)
        )
