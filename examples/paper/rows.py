"""One markdown row a run: loss by epoch, seconds, curvature pairs and memory.

    python -m examples.paper.rows runs/*.jsonl

prints the tables of docs/results.md from the files that ``python -m examples.paper run --out`` has written.
"""

import sys
from pathlib import Path
from typing import Any

from examples.paper.methods import METHODS
from examples.paper.records import read

EPOCHS = (1, 2, 3, 4, 6, 8, 10, 14, 20)


def main(paths: list[str]) -> None:
    """Print the table."""
    runs = [read(Path(path)) for path in paths]
    last = max((int(e["epoch"]) for run in runs for e in run if e["kind"] == "epoch"), default=0)
    epochs = [e for e in EPOCHS if e <= last]
    head = ["method", "(α, λ)", "T", "seed", *map(str, epochs), "s an epoch", "state MB", "pairs A", "pairs G"]
    print("| " + " | ".join(head) + " |")
    print("|---" * len(head) + "|")
    for run in runs:
        print("| " + " | ".join(_row(run, epochs)) + " |")
    print("\nTraining loss on the whole set after each epoch; pairs as kept (damped) / skipped.\n")
    for text in sorted({_machine(run) for run in runs}):
        print(text)


def _row(run: list[dict[str, Any]], epochs: list[int]) -> list[str]:
    cell = run[0]["cell"]
    losses = {r["epoch"]: r for r in run if r["kind"] == "epoch"}
    end = run[-1]
    last = max(losses.values(), key=lambda r: r["epoch"])
    damping = "-" if cell["damping"] is None else f"{cell['damping']:g}"
    frequency = "-" if METHODS[cell["method"]].first_order else str(cell["update_freq"])
    seconds = f"{last['seconds'] / last['epoch']:.1f}" if last["epoch"] else "-"
    cells = [f"{losses[e]['train_loss']:.2f}" if e in losses else "" for e in epochs]
    if end.get("outcome") == "diverged":
        cells[min(len(losses) - 1, len(cells) - 1)] = f"diverged at iteration {end['iteration']}"
    memory = f"{last['state_bytes'] / 2**20:.1f}" if "state_bytes" in last else ""
    return [
        METHODS[cell["method"]].title,
        f"({cell['lr']:g}, {damping})",
        frequency,
        str(cell["seed"]),
        *cells,
        seconds,
        memory,
        _pairs(last.get("pairs_A")),
        _pairs(last.get("pairs_G")),
    ]


def _pairs(counts: dict[str, int] | None) -> str:
    return "" if counts is None else f"{counts['kept']} ({counts['damped']}) / {counts['skipped']}"


def _machine(run: list[dict[str, Any]]) -> str:
    e = run[0]["environment"]
    versions = ", ".join(f"{name} {v}" for name, v in e["versions"].items() if name in ("torch", "kfqn-ext"))
    return f"{e['processor']}, {e['threads']} thread(s), {versions}, Python {e['python']}, {run[0]['started'][:10]}"


if __name__ == "__main__":
    main(sys.argv[1:])
