"""The figures of docs/performance.md again, from what is kept in results/: ``python -m benchmarks.figures``."""

import json
from pathlib import Path

from benchmarks import report, scaling

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs/performance", ROOT / "results"
FIGURES = {"bench": ("benchmarks.jsonl", report.draw), "scaling": ("benchmarks-scaling.jsonl", scaling.draw)}


def main(folder: Path = DOCS) -> None:
    """Draw what has numbers."""
    for name, (file, draw) in FIGURES.items():
        if (RESULTS / file).exists():
            draw(json.loads((RESULTS / file).read_text()), folder / f"{name}.png")


if __name__ == "__main__":
    main()
