"""Training losses of the autoencoder as tables and as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.report import markdown, save
from benchmarks.untuned.report import cost, failures

Curve = Sequence[tuple[int, float, float | None]]  # epoch, seconds, training loss
_AFTER = (1, 2, 5, 10, 20, 40)
_TARGETS = (60.0, 56.0, 54.0, 51.3)


def render(results: dict[str, Any]) -> str:
    """All tables of a log; where there are several seeds, a cell has a number for each."""
    return "\n\n".join(
        [
            "Training loss after so many epochs.",
            _losses(results),
            "Epochs, and seconds, until the training loss has reached",
            _targets(results),
            *failures(results),
            cost(results),
            f"`{results['command']}`",
        ]
    )


def _losses(results: dict[str, Any]) -> str:
    last = results["epochs"]
    epochs = [*(epoch for epoch in _AFTER if epoch < last), last]
    rows = [["", *map(str, epochs)]]
    for name, title in results["optimizers"].items():
        rows.append([title, *(", ".join(after(curve, epoch) for curve in _curves(results, name)) for epoch in epochs)])
    return markdown(rows)


def _targets(results: dict[str, Any]) -> str:
    rows = [["", *(f"{target:g}" for target in _TARGETS)]]
    for name, title in results["optimizers"].items():
        curves = _curves(results, name)
        rows.append([title, *(", ".join(until(curve, target) for curve in curves) for target in _TARGETS)])
    return markdown(rows)


def _curves(results: dict[str, Any], name: str) -> list[Curve]:
    return [cell["curve"] for cell in results["cells"] if cell["optimizer"] == name]


def after(curve: Curve, epoch: int) -> str:
    """The loss after an epoch; ∞ where it is not finite, and where training has ended before."""
    loss = next((loss for number, _, loss in curve if number == epoch), None)
    return "∞" if loss is None else f"{loss:.2f}"


def until(curve: Curve, target: float) -> str:
    """The first epoch after which the loss is no larger, and the seconds until then."""
    reached = ((epoch, seconds) for epoch, seconds, loss in curve if loss is not None and loss <= target)
    return next((f"{epoch} ({seconds:.0f} s)" for epoch, seconds in reached), "–")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw losses by epoch and by second, from the first epoch on; an optimizer has one color for all seeds."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True)
    for ax, column, label in zip(axes, (0, 1), ("epoch", "seconds"), strict=True):
        for number, (name, title) in enumerate(results["optimizers"].items()):
            for curve in _curves(results, name):
                points = [point for point in curve[1:] if point[2] is not None]
                x, y = [point[column] for point in points], [point[2] for point in points]
                ax.plot(x, y, color=f"C{number}", label=title)
        ax.set(xlabel=label, yscale="log")
        ax.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("training loss")
    lines = {line.get_label(): line for line in axes[0].get_lines()}
    axes[0].legend(lines.values(), lines.keys(), frameon=False)
    save(figure, path)
