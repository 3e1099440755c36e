"""How H_G and H_A become inverses: a linear net with squared loss, where G and A are constant and known.

    python examples/learning_the_inverse.py [--steps 1000] [--out runs/learning_the_inverse.png] [--quick]

The net is h = W₁ a, output = W₂ h, on real digits; W₁ is trained, W₂ is fixed. With f = ‖output - y‖² averaged over
data, G = ∂²f/∂h² = 2 W₂ᵀ W₂ is the same for every datum, and A = E[a aᵀ]. Three things can be seen:

1. The pair that K-BFGS learns H_G from is exact: y_G = G s_G, for minibatches and moving averages too.
2. H_G becomes (G + λ_G I)⁻¹ on the subspace that the steps visit, the range of W₂ᵀ, and stays I / λ_G elsewhere.
3. H_A becomes (A + λ_A I)⁻¹ if A is that of all data. From a minibatch's A it comes close, and then shrinks: noise in
   A makes BFGS forget how small A is in most directions.

Half a minute on one core. Exits with 1 if something of this does not hold.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

try:
    import torch
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table
    from sklearn.datasets import load_digits
    from torch import Tensor, nn
    from torch.nn.functional import one_hot

    from kfqn_ext import KBFGS, KBFGSL, Minibatch
    from kfqn_ext.optim import KroneckerOptimizer
    from kfqn_ext.optim.inverses import HessianAction, InputInverse, Measured, MovingHessianAction, State
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None

HIDDEN, CLASSES, BATCH, DAMPING = 12, 10, 128, 0.01  # λ; on a linear layer λ_A = λ_G = √λ
SQRT_DAMPING = DAMPING**0.5


def digits() -> tuple[Tensor, Tensor]:
    """1,797 images, the 61 pixels that are not the same in all of them, and one-hot labels."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16)
    return x[:, x.std(0) > 0], one_hot(torch.tensor(labels), CLASSES).double()


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Summed over outputs, averaged over data."""
    return (output - y).square().sum(1).mean()


def linear_net(d_in: int) -> nn.Sequential:
    """W₂ W₁ with W₁ to be trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(d_in, HIDDEN), nn.Linear(HIDDEN, CLASSES, bias=False)).double()
    model[1].requires_grad_(False)
    return model


def minibatches(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> Iterator[Minibatch]:
    """Drawn with replacement; the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        index = torch.randint(len(x), (BATCH,), generator=generator)
        yield Minibatch(model, squared_error, x[index], y[index])


def spectrum(H: Tensor, matrix: Tensor) -> Tensor:
    """Eigenvalues of H · matrix, for symmetric positive definite ones: all 1 where H is the inverse."""
    L = torch.linalg.cholesky(matrix)
    return torch.linalg.eigvalsh(L.T @ H @ L)


def distance(eigenvalues: Tensor) -> float:
    """Root mean square of their differences from 1."""
    return (eigenvalues - 1).square().mean().sqrt().item()


# ------------------------------------------------------------------------------------------ H_G


@dataclass
class OutputRun:
    """What happened to H_G, by iteration."""

    pair_error: list[float]  # ‖y_G - G s_G‖ / ‖y_G‖
    distance: list[float]  # of H_G from the inverse, on the visited subspace
    elsewhere: list[float]  # of H_G from I / λ_G, relative, on its complement


def learn_G(make: Callable[[nn.Module], KroneckerOptimizer], x: Tensor, y: Tensor, steps: int) -> OutputRun:
    """Train W₁, and compare H_G with what it should become."""
    model = linear_net(x.shape[1])
    W1, W2 = model[0].weight, model[1].weight
    G, eye = 2 * W2.T @ W2, torch.eye(HIDDEN, dtype=W2.dtype)
    directions = torch.linalg.svd(W2).Vh.T
    visited, rest = directions[:, :CLASSES], directions[:, CLASSES:]  # range and kernel of W₂
    target = visited.T @ (G + SQRT_DAMPING * eye) @ visited
    optimizer, run = make(model), OutputRun([], [], [])
    for minibatch in minibatches(model, x, y, steps):
        optimizer.step(minibatch)
        state = optimizer.state[W1]
        s, y_G, H = state["s_G"], state["y_G"], optimizer.recipe.output_inverse.precondition(state, eye)
        run.pair_error.append(((y_G - G @ s).norm() / y_G.norm()).item())
        run.distance.append(distance(spectrum(visited.T @ H @ visited, target)))
        run.elsewhere.append((SQRT_DAMPING * H @ rest - rest).norm().item())
    return run


# ------------------------------------------------------------------------------------------ H_A


class FromIdentity(InputInverse):
    """Starts from I / λ_A instead of from the first inverse, so that there is something to learn."""

    def start(self, state: State, like: Tensor, measured: Measured, damping: Tensor) -> None:  # noqa: D102
        super().start(state, like, measured, damping)
        state["H_A"] = torch.eye(like.shape[-1], dtype=like.dtype) / damping


@dataclass(frozen=True)
class OneMinibatch(FromIdentity, HessianAction):
    """K-BFGS."""


@dataclass(frozen=True)
class MovingAverage(FromIdentity, MovingHessianAction):
    """K-BFGS-20; with decay = 1 the average stays what the warm start has made it."""


RULES: dict[str, InputInverse] = {
    "A of all data": MovingAverage(decay=1.0),
    "moving average (K-BFGS-20)": MovingAverage(decay=0.9),
    "A of the minibatch (K-BFGS)": OneMinibatch(),
}


def learn_A(rule: InputInverse, x: Tensor, y: Tensor, steps: int) -> list[Tensor]:
    """Let H_A learn from minibatches; return the eigenvalues of H_A (A + λ_A I) by iteration."""
    model = linear_net(x.shape[1])
    a = torch.cat((x, x.new_ones(len(x), 1)), dim=1)
    A, eye = a.T @ a / len(a), torch.eye(a.shape[1], dtype=a.dtype)
    # H_A depends on the layer's inputs alone: nothing needs to move.
    optimizer = KroneckerOptimizer(
        model,
        model[0].parameters(),
        recipe=replace(KBFGS.recipe_as_printed, input_inverse=rule),
        lr=0.0,
        damping=DAMPING,
        curvature_update_freq=1,
    )
    optimizer.warm_start([x], progress=False)
    found = [spectrum(optimizer.state[model[0].weight]["H_A"], A + SQRT_DAMPING * eye)]
    for minibatch in minibatches(model, x, y, steps):
        optimizer.step(minibatch)
        found.append(spectrum(optimizer.state[model[0].weight]["H_A"], A + SQRT_DAMPING * eye))
    return found


# ------------------------------------------------------------------------------------------ what came out

COLORS = ("#0b5fa5", "#e07b00", "#3f9b62")


def plot(runs: dict[str, OutputRun], spectra: dict[str, list[Tensor]], path: Path) -> None:
    """Draw the three parts side by side."""
    figure = Figure(figsize=(14, 4.8), dpi=150, layout="constrained")
    pairs, outputs, inputs = figure.subplots(1, 3)
    first = next(iter(runs.values()))
    pairs.loglog(range(1, len(first.pair_error) + 1), first.pair_error, color=COLORS[0], lw=1.2)
    pairs.axhline(2**-52, color="#7a7a85", ls="--", lw=1)
    pairs.text(0.98, 2**-52 * 1.4, "float64", transform=pairs.get_yaxis_transform(), ha="right", color="#7a7a85")
    pairs.set(ylim=(5e-17, 1), title="1   The pair is exact", ylabel=r"$\|y_G - G\,s_G\| \;/\; \|y_G\|$")
    for (name, run), color in zip(runs.items(), COLORS, strict=False):
        width = 2.4 if color == COLORS[0] else 1.2
        outputs.loglog(range(1, len(run.distance) + 1), run.distance, color=color, label=name, lw=width)
    outputs.set(
        title=r"2   $H_G$ on the subspace that is visited",
        ylabel=r"distance of $H_G$ from $(G + \lambda_G I)^{-1}$",
    )
    for (name, spectrum), color in zip(spectra.items(), COLORS, strict=True):
        inputs.loglog(range(1, len(spectrum)), [distance(e) for e in spectrum[1:]], color=color, label=name, lw=2.4)
    inputs.set(title=r"3   $H_A$ in all directions", ylabel=r"distance of $H_A$ from $(A + \lambda_A I)^{-1}$")
    for ax in (pairs, outputs, inputs):
        ax.set_xlabel("iteration")
        ax.grid(color="#e6e6ea")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in (outputs, inputs):
        ax.legend(frameon=False, loc="lower left")
    figure.suptitle("A linear net with squared loss: what K-BFGS learns, and from what", fontsize=14)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def show(console: Console, runs: dict[str, OutputRun], spectra: dict[str, list[Tensor]]) -> None:
    """Print how far the inverses have come."""
    steps = len(next(iter(runs.values())).distance)
    marks = [k for k in (1, 10, 100, 300, 1000, 3000) if k < steps] + [steps]
    table = Table("distance from the inverse after", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for k in marks:
        table.add_column(f"{k}", justify="right")
    for name, run in runs.items():
        table.add_row(f"H_G, {name}", *(f"{run.distance[k - 1]:.1e}" for k in marks))
    for name, spectrum in spectra.items():
        table.add_row(f"H_A, {name}", *(f"{distance(spectrum[k]):.1e}" for k in marks))
    console.print(table)
    console.print(f"\ny_G - G s_G: at most {max(max(r.pair_error) for r in runs.values()):.0e} of y_G", highlight=False)
    for name, spectrum in spectra.items():
        smallest, largest = spectrum[-1][0].item(), spectrum[-1][-1].item()
        console.print(f"H_A (A + λ_A I), {name}: eigenvalues {smallest:.2f} to {largest:.2f}", highlight=False)


def failures(runs: dict[str, OutputRun], spectra: dict[str, list[Tensor]], steps: int) -> list[str]:
    """What was claimed above and does not hold."""
    bfgs, (constant, moving, minibatch) = runs["K-BFGS"], spectra.values()
    closest = min(map(distance, minibatch))
    claims = {
        "y_G = G s_G": max(max(run.pair_error) for run in runs.values()) < 1e-10,
        "H_G becomes (G + λ_G I)⁻¹ on the visited subspace": bfgs.distance[-1] < (1e-3 if steps >= 1000 else 1.0),
        "H_G stays I / λ_G elsewhere": max(bfgs.elsewhere) < 1e-9,
        "H_A becomes (A + λ_A I)⁻¹ for a constant A": distance(constant[-1]) < (0.03 if steps >= 1000 else 0.2),
        "and from above, getting closer at every update": all(
            later[-1] <= earlier[-1] * (1 + 1e-9) and later[0] > 1 - 1e-9
            for earlier, later in zip(constant, constant[1:], strict=False)
        ),
        "a moving average is closer than one minibatch": distance(moving[-1]) < distance(minibatch[-1]),
        "a minibatch's A leads from far away close to the inverse": closest < 0.05 * distance(minibatch[0]),
    }
    return [claim for claim, holds in claims.items() if not holds]


def main() -> int:
    """Run the three parts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/learning_the_inverse.png"), help="where to draw")
    parser.add_argument("--quick", action="store_true", help="100 steps")
    args = parser.parse_args()
    steps = 100 if args.quick else args.steps

    torch.set_num_threads(1)  # the tensors are small
    x, y = digits()
    options = {"lr": 0.2, "damping": DAMPING, "curvature_update_freq": 1}
    runs = {
        "K-BFGS": learn_G(lambda model: KBFGS.as_printed(model, model[0].parameters(), **options), x, y, steps),
        "K-BFGS(L), 20 pairs": learn_G(
            lambda model: KBFGSL.as_printed(model, model[0].parameters(), history_size=20, **options), x, y, steps
        ),
    }
    spectra = {name: learn_A(rule, x, y, steps) for name, rule in RULES.items()}
    console = Console()
    show(console, runs, spectra)
    plot(runs, spectra, args.out)
    console.print(f"\nCurves: {args.out}", highlight=False)
    failed = failures(runs, spectra, steps)
    for claim in failed:
        console.print(f"[red]Does not hold: {claim}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
