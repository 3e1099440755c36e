"""One rung beside the exact block: all numbers of a row of the report."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kfqn_ext.curvature import metrics
from kfqn_ext.curvature.report import Row
from kfqn_ext.curvature.rungs import Facts, Held, Rung
from kfqn_ext.linalg.nearest import kron


@dataclass(frozen=True)
class Newton:
    """The exact block with a damping, and its direction.

    Attributes:
        damped: B + λI, [G, p, p].
        direction: (B + λI)⁻¹ g, [G, p].
        decrease: What it gains on the damped quadratic model.
    """

    damped: Tensor
    direction: Tensor
    decrease: float

    @classmethod
    def of(cls, exact: Tensor, gradient: Tensor, damping: float) -> "Newton":
        """Solve for the direction."""
        damped = exact.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(damping)
        direction = metrics.damped_solve(exact, damping, gradient)
        bend = metrics.quadratic_form(damped, direction)
        return cls(damped, direction, metrics.best_decrease(gradient, direction, bend))


@dataclass
class Yardstick:
    """The exact block of a layer, with which rungs are compared.

    Attributes:
        exact: [G, p, p].
        gradient: [G, p].
        facts: The layer's factors.
        spectrum: The exact block's eigenvalues, ascending.
    """

    exact: Tensor
    gradient: Tensor
    facts: Facts
    spectrum: Tensor = field(init=False)
    _newton: dict[float, Newton] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Compute the spectrum once."""
        self.spectrum = metrics.eigenvalues(self.exact)

    def newton(self, damping: float) -> Newton:
        """Return Newton's direction at a damping."""
        if damping not in self._newton:
            self._newton = {damping: Newton.of(self.exact, self.gradient, damping)}
        return self._newton[damping]

    def measure(self, rung: Rung, damping: float) -> tuple[Row, Tensor]:
        """Compare one rung with the exact block.

        Args:
            rung: The rung.
            damping: λ where it has none of its own.

        Returns:
            The row and the rung's eigenvalues.
        """
        lam = rung.damping or damping
        newton = self.newton(lam)
        values, difference = metrics.eigenvalues(rung.matrix), rung.matrix - self.exact
        target = newton.damped if rung.damping else self.exact
        missed = torch.linalg.vector_norm(rung.matrix - target)
        row = Row(
            rung=rung.name,
            label=rung.label,
            damping=lam,
            error=metrics.relative_error(rung.matrix, self.exact),
            spectral_error=metrics.ratio(
                metrics.spectral_norm(metrics.eigenvalues(difference)), metrics.spectral_norm(self.spectrum)
            ),
            cosine=metrics.cosine(rung.matrix, self.exact),
            damped_error=metrics.ratio(missed, torch.linalg.vector_norm(newton.damped)),
            negative_mass=metrics.negative_mass(values),
            lowest=float(values[0]),
            highest=float(values[-1]),
        )
        self._add_direction(row, rung, lam)
        self._add_inverse_errors(row, rung, newton)
        return row, values

    def _add_direction(self, row: Row, rung: Rung, damping: float) -> None:
        newton, direction = self.newton(damping), rung.direction(self.gradient, damping)
        decrease = metrics.best_decrease(self.gradient, direction, metrics.quadratic_form(newton.damped, direction))
        row.angle = metrics.angle(direction, newton.direction)
        row.decrease = metrics.best_decrease(self.gradient, direction, metrics.quadratic_form(self.exact, direction))
        definite = float(self.spectrum[0]) + damping > 0
        row.share = decrease / newton.decrease if definite and newton.decrease > 0 else math.nan

    def _add_inverse_errors(self, row: Row, rung: Rung, newton: Newton) -> None:
        if not rung.damping:
            return
        lam, held = rung.damping, rung.held
        H = torch.linalg.inv(rung.matrix) if held is None else kron(held.H_A, held.H_G)
        if held is not None:
            add_factor_errors(row, held)
            row.H_aim_error = metrics.relative_error(H, kron(held.aim_A, held.aim_G))
        AG = kron(self.facts.A, self.facts.G)
        AG.diagonal(dim1=-2, dim2=-1).add_(lam)
        row.H_error = metrics.relative_error(H, torch.linalg.inv(AG))
        row.H_exact_error = metrics.relative_error(H, torch.linalg.inv(newton.damped))


def add_factor_errors(row: Row, held: Held) -> None:
    """Compare what an optimizer holds with what it aims at, factor by factor."""
    row.H_A_error = metrics.relative_error(held.H_A, held.aim_A)
    row.H_G_error = metrics.relative_error(held.H_G, held.aim_G)
    row.start_G_error = metrics.relative_error(held.start_G, held.aim_G)
