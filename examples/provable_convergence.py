"""The convergence theorem at work: K-BFGS(L) in the form that is proved to converge, on a sigmoid net for digits.

    python examples/provable_convergence.py [--steps 1000] [--out runs/provable_convergence.png] [--quick]

The theorem (thm_3 of the paper) says of ProvableKBFGSL with step sizes α_k = κ_low / (L κ_high²) k^-β: the mean of
‖∇f(θ_k)‖² over the first K iterations is at most

    2 L (max f - min f) κ_high² / κ_low² K^(β-1) + σ² / ((1 - β) m) (K^-β - 1/K)

where κ_low I ⪯ H ⪯ κ_high I holds for all inverses H = H_A ⊗ H_G that are used, L is the gradient's Lipschitz constant,
m the size of a minibatch, and σ² the variance of one datum's gradient. Three runs:

* with the κ that the paper's lemma guarantees: safe, and so small that nothing moves;
* with the κ that such a run turns out to have: the same theorem, and a method that trains;
* with a constant step, for comparison: outside of the theorem.

Half a minute on one core. Exits with 1 if a bound is broken or the mean falls more slowly than K^(β-1).
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

try:
    import numpy as np
    import torch
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table
    from sklearn.datasets import load_digits
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy

    from kfqn_ext import Minibatch, ProvableKBFGSL
    from kfqn_ext.optim import kappa_bounds, theorem_step_sizes
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None

BETA, BATCH, PAIRS = 0.6, 64, 3
DAMPING_A, DAMPING_G = 60.0, 3.0  # large: then κ_low and κ_high are close to each other, and the steps are longer
WIDTH, PIXELS, IMAGES = 16, 64, 600


def digits() -> tuple[Tensor, Tensor]:
    """600 images of 64 pixels from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:IMAGES] / 16), torch.tensor(labels[:IMAGES])


def sigmoid_net() -> nn.Sequential:
    """All inputs of both layers are between 0 and 1, as the theorem needs (φ = 1)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 10)).double()
    for layer in (model[0], model[2]):
        nn.init.xavier_normal_(layer.weight, gain=4.0)  # Glorot and Bengio's factor for sigmoids
        nn.init.zeros_(layer.bias)
    return model


# ------------------------------------------------------------------------------------------ the theorem's quantities


def loss_and_gradient(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """F and ‖∇f‖² over all data."""
    loss = cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), sum(g.square().sum().item() for g in gradients)


def curvature(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Largest absolute eigenvalue of the Hessian, by power iteration: a lower bound on L that is attained locally."""
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(cross_entropy(model(x), y), parameters, create_graph=True)
    generator = torch.Generator().manual_seed(0)
    v = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in parameters]
    size = 1.0
    for _ in range(20):
        v = list(torch.autograd.grad(gradient, parameters, [part / size for part in v], retain_graph=True))
        size = sum(part.square().sum().item() for part in v) ** 0.5
    return size


def variance(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """σ²: mean squared distance of one datum's gradient from the mean."""

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(torch.func.functional_call(model, parameters, (x.unsqueeze(0),)), y.unsqueeze(0))

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    return sum(g.flatten(1).var(0, unbiased=False).sum().item() for g in gradients.values())


# ------------------------------------------------------------------------------------------ runs


@dataclass
class Trajectory:
    """One training, by iteration; L and σ² are the largest that were found along it."""

    losses: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)  # ‖∇f(θ_k)‖²
    low: list[float] = field(default_factory=list)  # smallest eigenvalue of H_A ⊗ H_G, of any layer
    high: list[float] = field(default_factory=list)
    lipschitz: float = 0.0
    sigma2: float = 0.0

    @property
    def running_mean(self) -> np.ndarray:
        """(1/K) Σ_k ‖∇f(θ_k)‖²."""
        return np.cumsum(self.squares) / np.arange(1, len(self.squares) + 1)


def train(lr: float | Callable[[int], float], steps: int, x: Tensor, y: Tensor) -> Trajectory:
    """Train with ProvableKBFGSL, and note all that the theorem speaks of."""
    model, run = sigmoid_net(), Trajectory()
    optimizer = ProvableKBFGSL(model, lr=lr, damping_A=DAMPING_A, damping_G=DAMPING_G, history_size=PAIRS)
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        loss, square = loss_and_gradient(model, x, y)
        run.losses.append(loss)
        run.squares.append(square)
        if (k + 1).bit_count() == 1:  # 1, 2, 4, …: the curvature changes most at first
            run.lipschitz = max(run.lipschitz, curvature(model, x, y))
            run.sigma2 = max(run.sigma2, variance(model, x, y))
        index = torch.randint(len(x), (BATCH,), generator=generator)
        optimizer.step(Minibatch(model, cross_entropy, x[index], y[index]))
        layers = optimizer.diagnostics(eigenvalues=True)
        run.low.append(min(d.A.smallest * d.G.smallest for d in layers))
        run.high.append(max(d.A.largest * d.G.largest for d in layers))
    return run


def lemma() -> tuple[float, float]:
    """κ_low and κ_high that hold whatever happens: lemma_1 of the paper."""
    bounds = [kappa_bounds(inputs + 1, 1, DAMPING_A, DAMPING_G, PAIRS) for inputs in (PIXELS, WIDTH)]
    return min(b.low for b in bounds), max(b.high for b in bounds)


def measure(steps: int, x: Tensor, y: Tensor) -> tuple[float, float, float]:
    """κ_low, κ_high and L of a short run; with a margin, since the long one goes further. `failures` looks at that."""
    model = sigmoid_net()
    first = DAMPING_A * DAMPING_G / (4 * curvature(model, x, y))  # a quarter of 1/L, where H is about I / (λ_A λ_G)
    pilot, margin = train(lambda k: first * k**-BETA, steps, x, y), 1.05
    return min(pilot.low) / margin, max(pilot.high) * margin, pilot.lipschitz * margin


@dataclass
class Bound:
    """The theorem's right-hand side for one run."""

    low: float
    high: float
    lipschitz: float
    values: np.ndarray

    @classmethod
    def of(cls, run: Trajectory, low: float, high: float, lipschitz: float) -> "Bound":
        """From the constants that its step sizes were made of; 0 is a lower bound of the loss."""
        K = np.arange(1, len(run.squares) + 1)
        first = 2 * lipschitz * max(run.losses) * (high / low) ** 2 * K ** (BETA - 1)
        noise = run.sigma2 / ((1 - BETA) * BATCH) * (K**-BETA - 1 / K)
        return cls(low, high, lipschitz, first + noise)


def slope(values: np.ndarray) -> float:
    """Exponent of the power of K that fits the second half of the (logarithmic) range of K best."""
    K = np.arange(1, len(values) + 1)
    late = int(len(K) ** 0.5)
    return float(np.polyfit(np.log(K[late:]), np.log(values[late:]), 1)[0])


# ------------------------------------------------------------------------------------------ what came out

NAMES = ("lemma's κ", "measured κ", "constant step")
COLORS = dict(zip(NAMES, ("#7a7a85", "#0b5fa5", "#e07b00"), strict=True))


def plot(runs: dict[str, Trajectory], bounds: dict[str, Bound], path: Path) -> None:
    """Draw the running means with their bounds, and the eigenvalues of the inverses with theirs."""
    figure = Figure(figsize=(12.5, 5), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2)
    K = np.arange(1, len(runs[NAMES[0]].squares) + 1)
    for name, run in runs.items():
        left.loglog(K, run.running_mean, color=COLORS[name], lw=2.2, label=name)
    for name, bound in bounds.items():
        if bound.values[0] < 1e6 * runs[name].running_mean[0]:
            left.loglog(K, bound.values, color=COLORS[name], lw=1.4, ls="--", label=f"the theorem's bound with {name}")
    start, mean = 10, runs[NAMES[1]].running_mean
    rate = mean[start - 1] * (K[start - 1 :] / start) ** (BETA - 1)
    left.loglog(K[start - 1 :], rate, color="black", lw=1.2, ls=":", label=rf"rate $K^{{\,\beta-1}}$, $\beta$ = {BETA}")
    left.set(xlabel="K", ylabel=r"mean of $\|\nabla f(\theta_k)\|^2$ over $k \leq K$", title="The gradient vanishes")

    low, high = lemma()
    right.axhspan(low, high, color="#f0f0f3")
    right.text(1.3, high * 0.6, "inside the lemma's bounds", va="top", color=COLORS[NAMES[0]])
    for name in reversed(NAMES[1:]):
        right.fill_between(K, runs[name].low, runs[name].high, color=COLORS[name], alpha=0.6, lw=1, label=name)
    right.set(xscale="log", yscale="log", xlabel="k", ylabel=r"eigenvalues of $H_A \otimes H_G$, all layers")
    right.set(title="All inverses stay between the bounds", ylim=(low / 3, high * 3))
    for ax in (left, right):
        ax.grid(color="#e6e6ea")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, loc="lower left" if ax is left else "center left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def show(console: Console, runs: dict[str, Trajectory], bounds: dict[str, Bound]) -> None:
    """Print the constants, the means and the bounds."""
    table = Table(
        *("step sizes", "α₁", "κ_low", "κ_high", "L", "mean", "bound", "falls like", "loss"),
        box=None, header_style="bold", padding=(0, 2, 0, 0),
    )  # fmt: skip
    for name, run in runs.items():
        bound = bounds.get(name)
        first = "" if bound is None else f"{bound.low / (bound.lipschitz * bound.high**2):.2g}"
        low, high = (min(run.low), max(run.high)) if bound is None else (bound.low, bound.high)
        table.add_row(
            name, first, f"{low:.2g}", f"{high:.2g}", f"{run.lipschitz:.2g}",
            f"{run.running_mean[-1]:.3g}", "" if bound is None else f"{bound.values[-1]:.2g}",
            f"K^{slope(run.running_mean):.2f}", f"{run.losses[-1]:.3f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"\nThe mean is that of ‖∇f‖², which starts at {runs[NAMES[0]].squares[0]:.3g}. "
        f"The theorem's rate: K^{BETA - 1:.2f}.",
        highlight=False,
    )


def failures(runs: dict[str, Trajectory], bounds: dict[str, Bound]) -> list[str]:
    """What the paper says and does not hold."""
    low, high = lemma()
    measured, start = runs[NAMES[1]], 10
    mean = measured.running_mean
    K = np.arange(start, len(mean) + 1)
    claims = {
        "κ_low I ⪯ H ⪯ κ_high I, lemma": all(low <= min(run.low) and max(run.high) <= high for run in runs.values()),
        "the measured κ and L belong to the run": all(
            bound.low <= min(runs[name].low)
            and max(runs[name].high) <= bound.high
            and runs[name].lipschitz <= bound.lipschitz
            for name, bound in bounds.items()
        ),
        "the theorem's bound": all((runs[name].running_mean <= bound.values).all() for name, bound in bounds.items()),
        "the running mean falls at least like K^(β-1)": (
            (mean[start - 1 :] <= mean[start - 1] * (K / start) ** (BETA - 1) * (1 + 1e-9)).all()
            and slope(mean) <= BETA - 1
        ),
    }
    return [claim for claim, holds in claims.items() if not holds]


def main() -> int:
    """Run the three trainings; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/provable_convergence.png"), help="where to draw")
    parser.add_argument("--quick", action="store_true", help="60 steps")
    args = parser.parse_args()
    steps = 60 if args.quick else args.steps

    torch.set_num_threads(1)  # the tensors are small
    x, y = digits()
    measured = measure(min(steps, 100), x, y)
    # The step sizes need L even where κ comes from the lemma.
    constants = {NAMES[0]: (*lemma(), measured[2]), NAMES[1]: measured}
    runs = {name: train(theorem_step_sizes(*values, BETA), steps, x, y) for name, values in constants.items()}
    bounds = {name: Bound.of(runs[name], *values) for name, values in constants.items()}
    runs[NAMES[2]] = train(100.0, steps, x, y)
    console = Console()
    show(console, runs, bounds)
    plot(runs, bounds, args.out)
    console.print(f"Curves: {args.out}", highlight=False)
    failed = failures(runs, bounds)
    for claim in failed:
        console.print(f"[red]Does not hold: {claim}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
