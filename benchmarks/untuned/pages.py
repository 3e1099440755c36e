"""Print all tables and figures again, from what is kept in results/: ``python -m benchmarks.untuned.pages``."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.marks import put_between_marks
from benchmarks.untuned import autoencoder_report, report, robust, summary, tried, widths

Lines = Sequence[dict[str, Any]]  # of all files of a part
ROOT = Path(__file__).resolve().parents[2]
PAGE, DETAILS, DESIGN = "docs/untuned.md", "docs/untuned/details.md", "docs/design.md"


@dataclass(frozen=True)
class Part:
    """What stands between two marks.

    Attributes:
        page: Where.
        files: What it is made of, in results/.
        render: Makes the text.
        draw: Makes the figure, where there is one, in docs/untuned/.
    """

    page: str
    files: Sequence[str]
    render: Callable[[Lines], str]
    draw: Callable[[Lines, Path], None] | None = None

    def lines(self) -> Lines:
        return [json.loads(line) for file in self.files for line in (ROOT / "results" / file).read_text().splitlines()]


def _one(render: Callable[[dict[str, Any]], str]) -> Callable[[Lines], str]:
    """Of a file with a single line."""
    return lambda lines: render(lines[0])


def _set(name: str) -> Part:
    def draw(lines: Lines, path: Path) -> None:
        report.draw(lines[0], path)

    return Part(DETAILS, [f"untuned-{name}.jsonl"], _one(report.render), draw)


def _tried(name: str) -> Part:
    def render(lines: Lines) -> str:
        return tried.render(next(line for line in lines if line["study"] == name))

    return Part(DESIGN, ["untuned-tried.jsonl"], render)


_TRIED = (
    "exponent",
    "warm-up",
    "decay",
    "reduction",
    "groups",
    "long",
    "normalized",
    "early",
    "burn-in",
    "burn-in-long",
    "damping-long",
    "damping-kbfgs",
    "damping-kfac",
    "damping-kfac-long",
    "averaged",
    "averaged-wide",
    "computed",
    "computed-long",
    "computed-wide",
    "computed-early",
    "small-weights",
)
_SETS = ["untuned-choice.jsonl", "untuned-held-out.jsonl"]

PARTS = {
    "summary": Part(PAGE, _SETS, summary.render, summary.draw),
    "choice": _set("choice"),
    "held-out": _set("held-out"),
    "robust": Part(DETAILS, ["untuned-robust.jsonl"], _one(robust.render)),
    "robust-two-pass": Part(DETAILS, ["untuned-robust-two-pass.jsonl"], _one(robust.render)),
    "robust-one-pass-kfac": Part(DETAILS, ["untuned-robust-one-pass-kfac.jsonl"], _one(robust.render)),
    "robust-held-out": Part(DETAILS, ["untuned-robust-held-out.jsonl"], _one(robust.render)),
    "widths": Part(DETAILS, ["untuned-widths.jsonl"], _one(widths.render)),
    "autoencoder": Part(DETAILS, ["untuned-autoencoder.jsonl"], autoencoder_report.render, autoencoder_report.draw),
    **{f"tried {name}": _tried(name) for name in _TRIED},
}


def main() -> None:
    for name, part in PARTS.items():
        lines = part.lines()
        put_between_marks(ROOT / part.page, f"untuned {name}", part.render(lines))
        if part.draw is not None:
            part.draw(lines, ROOT / "docs/untuned" / f"{name}.png")


if __name__ == "__main__":
    main()
