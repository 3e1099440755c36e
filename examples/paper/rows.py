"""One markdown row a run: loss by epoch, seconds and memory; and a figure of a few runs.

    python -m examples.paper.rows runs/*.jsonl --figure runs/loss.png --methods kbfgs kfac adam

reads what ``python -m examples.paper run --out`` and ``gather`` have written; docs/results.md has rows of this kind.
"""

import argparse
from pathlib import Path
from typing import Any

try:
    import matplotlib

    matplotlib.use("Agg")

    import matplotlib.pyplot as plt

    from examples.paper.results import time_column
    from examples.paper.sources import logs
    from workloads.lines import DPI, MOST, WIDTH, log_axis, look
    from workloads.methods import METHODS
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None

EPOCHS = (1, 4, 10, 20)  # few enough for a page; a log has all


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--figure", type=Path, help="draw the losses against epochs and seconds")
    few = "what is drawn, at most six: of each method the run that ends lowest"
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["kbfgs"], metavar="NAME", help=few)
    options = parser.parse_args(arguments)
    runs = [run for path in options.logs for run in logs(path)]
    print(table(runs))
    if options.figure is not None:
        draw(runs, options.methods, options.figure)


def table(runs: list[list[dict[str, Any]]]) -> str:
    """Lay out the runs' logs as a markdown table, with what its numbers are and where they were measured."""
    last = max((int(e["epoch"]) for run in runs for e in run if e["kind"] == "epoch"), default=0)
    epochs = [e for e in EPOCHS if e <= last] or [1]
    head = ["method", "(α, λ), T, seed", *map(str, epochs), "s an epoch", "state MB"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(_row(run, epochs)) + " |" for run in runs]
    lines += ["", "Training loss on the whole set after so many epochs.", ""]
    return "\n".join(lines + sorted({_machine(run) for run in runs}))


def draw(runs: list[list[dict[str, Any]]], methods: list[str], path: Path) -> None:
    """Draw training losses, counted from the lowest of all: of each method the run that ends lowest."""
    lines = [_lowest([run for run in runs if run[0]["cell"]["method"] == method]) for method in methods[:MOST]]
    base = min(e["train_loss"] for run in lines for e in _losses(run))
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.9), sharey=True, layout="constrained")
    for ax, against in zip(axes, ("epoch", "seconds"), strict=True):
        for number, run in enumerate(lines):
            x = [e["epoch" if against == "epoch" else time_column(run[0])] for e in _losses(run)]
            ax.plot(x, [e["train_loss"] - base for e in _losses(run)], label=_label(run), **look(number))
        ax.set_xlabel("epochs" if against == "epoch" else "seconds of training", fontsize=9)
        log_axis(ax)
    axes[0].set_ylabel(f"training loss - {base:.2f}, the lowest", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _lowest(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The one that ends lowest, of those with a finite loss after some epoch."""
    return min((run for run in runs if len(_losses(run)) > 1), key=lambda run: _losses(run)[-1]["train_loss"])


def _losses(run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in run if e["kind"] == "epoch" and e.get("train_loss")]


def _label(run: list[dict[str, Any]]) -> str:
    cell = run[0]["cell"]
    frequency = "" if METHODS[cell["method"]].first_order else f", T {cell['update_freq']}"
    return f"{METHODS[cell['method']].title}, α {cell['lr']:g}{frequency}"


def _row(run: list[dict[str, Any]], epochs: list[int]) -> list[str]:
    cell = run[0]["cell"]
    losses = {r["epoch"]: r for r in run if r["kind"] == "epoch"}
    end = run[-1]
    last = max(losses.values(), key=lambda r: r["epoch"])
    damping = "-" if cell["damping"] is None else f"{cell['damping']:g}"
    frequency = "-" if METHODS[cell["method"]].first_order else str(cell["update_freq"])
    seconds = f"{last[time_column(run[0])] / last['epoch']:.1f}" if last["epoch"] else "-"
    cells = [_loss(losses[e]["train_loss"]) if "train_loss" in losses.get(e, {}) else "" for e in epochs]
    if end.get("outcome") == "diverged":
        _add(cells, epochs, last["epoch"], f"diverged at iteration {end['iteration']}")
    memory = f"{last['state_bytes'] / 2**20:.1f}" if "state_bytes" in last else ""
    return [
        METHODS[cell["method"]].title,
        f"({cell['lr']:g}, {damping}), {frequency}, {cell['seed']}",
        *cells,
        seconds,
        memory,
    ]


def _add(cells: list[str], epochs: list[int], last: float, text: str) -> None:
    """Say what happened after the last epoch logged: in the first column after it, or else behind the last loss."""
    later = [i for i, epoch in enumerate(epochs) if epoch > last]
    if later:
        cells[later[0]] = text
    else:
        cells[-1] = ", then ".join(filter(None, [cells[-1], text]))


def _loss(value: float) -> str:
    return f"{value:.2f}" if value < 1e4 else f"{value:.0e}"


def _machine(run: list[dict[str, Any]]) -> str:
    e = run[0]["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in e["versions"].items() if name in ("torch", "kfqn-ext"))
    return f"{e['processor']}, {e['threads']} thread(s), {versions}, Python {e['python']}, {run[0]['started'][:10]}"


if __name__ == "__main__":
    main()
