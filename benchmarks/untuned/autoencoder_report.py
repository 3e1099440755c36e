"""Training losses of the autoencoder as tables and as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.report import markdown, save
from benchmarks.untuned.report import cost, failures
from workloads.lines import WIDTH, log_axis, look

Curve = Sequence[tuple[int, float | None, float | None]]  # epoch, seconds where they were kept, training loss
_AFTER = (1, 2, 5, 10, 20)
_TARGETS = (60.0, 56.0, 54.0, 51.3)


def render(lines: Sequence[dict[str, Any]]) -> str:
    """All tables of a log, a line for each number of epochs; with several seeds, a cell has a number for each."""
    failed = [text for results in lines for text in failures(results)]
    made = [text for results in lines for text in (cost(results), f"`{results['command']}`")]
    losses, targets = _losses(lines), _targets(lines)
    first, second = "Training loss after so many epochs.", "Epochs, and seconds, until the training loss has reached"
    return "\n\n".join([first, losses, second, targets, *failed, *made])


def _losses(lines: Sequence[dict[str, Any]]) -> str:
    ends = {results["epochs"] for results in lines}
    epochs = sorted({*(epoch for epoch in _AFTER if epoch < max(ends)), *ends})
    rows = [["", *map(str, epochs)]]
    for title, last, curves in _rows(lines):
        cells = [", ".join(after(curve, epoch) for curve in curves) if epoch <= last else "" for epoch in epochs]
        rows.append([title, *cells])
    return markdown(rows)


def _targets(lines: Sequence[dict[str, Any]]) -> str:
    rows = [["", *(f"{target:g}" for target in _TARGETS)]]
    for title, _, curves in _rows(lines):
        rows.append([title, *(", ".join(until(curve, target) for curve in curves) for target in _TARGETS)])
    return markdown(rows)


def _rows(lines: Sequence[dict[str, Any]]) -> list[tuple[str, int, list[Curve]]]:
    """What an optimizer is called, for how many epochs it ran, and a curve for each seed."""
    rows = []
    for results in lines:
        for name, title in results["optimizers"].items():
            curves = [cell["curve"] for cell in results["cells"] if cell["optimizer"] == name]
            rows.append((f"{title}, {results['epochs']} epochs", results["epochs"], curves))
    return rows


def _longest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines, each without the optimizers of which another has a longer run."""
    most = {name: max(r["epochs"] for r in lines if name in r["optimizers"]) for r in lines for name in r["optimizers"]}
    return [
        {**r, "optimizers": {name: title for name, title in r["optimizers"].items() if most[name] == r["epochs"]}}
        for r in lines
    ]


def after(curve: Curve, epoch: int) -> str:
    """The loss after an epoch; ∞ where it is not finite, and where training has ended before."""
    loss = next((loss for number, _, loss in curve if number == epoch), None)
    return "∞" if loss is None else f"{loss:.2f}"


def until(curve: Curve, target: float) -> str:
    """The first epoch after which the loss is no larger, and the seconds until then, where these were kept."""
    reached = ((epoch, seconds) for epoch, seconds, loss in curve if loss is not None and loss <= target)
    texts = (f"{epoch}" if seconds is None else f"{epoch} ({seconds:.0f} s)" for epoch, seconds in reached)
    return next(texts, "–")


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw losses by epoch, from the first one on, in the longest runs; an optimizer has one look for all seeds."""
    figure, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    for number, (title, _, curves) in enumerate(_rows(_longest(lines))):
        for curve in curves:
            points = [(epoch, loss) for epoch, _, loss in curve[1:] if loss is not None]
            ax.plot(*zip(*points, strict=True), label=title, **look(number))
    ax.set_xlabel("epoch", fontsize=9)
    ax.set_ylabel("training loss", fontsize=9)
    log_axis(ax)
    titles = {line.get_label(): line for line in ax.get_lines()}
    figure.legend(titles.values(), titles.keys(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, path)
