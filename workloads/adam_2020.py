"""Adam as the authors' code of 2020 has it, which is not Kingma and Ba's."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

BETA = 0.9


class Adam2020(Optimizer):
    """β₂ = 0.9, and the second moment is that of the averaged gradient m̂, not of the gradient.

    A component whose average keeps its sign moves by nearly α at each step, however noisy its gradient is.
    """

    def __init__(self, params: Any, lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "step": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """θ ← θ - α m̂ / (√v̂ + ε) with v ← βv + (1 - β) m̂²."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
            self._move(params, group)
        return loss

    def _move(self, params: list[Tensor], group: dict[str, Any]) -> None:
        correction = 1 - BETA ** group["step"]
        m, v = ([self.state[p][name] for p in params] for name in "mv")
        torch._foreach_lerp_(m, [p.grad for p in params], 1 - BETA)
        m_hat = torch._foreach_div(m, correction)
        torch._foreach_mul_(v, BETA)
        torch._foreach_addcmul_(v, m_hat, m_hat, value=1 - BETA)
        root = torch._foreach_div(v, correction)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, group["eps"])
        torch._foreach_addcdiv_(params, m_hat, root, value=-group["lr"])
