"""The tables of docs/performance.md again, with their numbers in results/: ``make bench-record``.

Runs the programs of the page one after the other, each in a process of its own. That takes forty minutes of an idle
core. One that fails is named at the end, and the others go on. The large table under Results has a command of its own,
and so has the time to a loss: each takes half an hour or more.
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks import options
from benchmarks.marks import put_between_marks
from benchmarks.problems import PROBLEMS
from benchmarks.report import markdown

_ROOT = Path(__file__).parents[1]
DOCS, RESULTS = Path("docs/performance.md"), Path("results")
_MARK = "parts of the performance page"


@dataclass(frozen=True)
class PagePart:
    """A table of the page.

    Attributes:
        what: What the numbers are, for the list of logs.
        section: Where the page shows them.
        options: Of the program besides where its output goes.
        needs_data: Whether it trains on MNIST.
        figure: The figure that it draws too.
    """

    what: str
    section: str
    options: Sequence[str] = ()
    needs_data: bool = False
    figure: str | None = None

    def arguments(self, name: str, data_root: Path) -> list[str]:
        """Of the program, as it is called from the root of the repository."""
        files = ["--docs", str(DOCS), "--json", str(log(name))]
        figure = [] if self.figure is None else ["--figure", self.figure]
        data = ["--data-root", str(data_root)] if self.needs_data else []
        return [*self.options, *data, *files, *figure]


PARTS = {
    "launches": PagePart("operations of a step by part and by layer, as a GPU would launch them", "on-a-gpu"),
    "profile": PagePart("the parts of a step", "where-the-time-goes", ("--problem", *PROBLEMS)),
    "floors": PagePart("what cannot be left out of a step", "where-a-target-is-missed"),
    "scaling": PagePart(
        "the parts of a step by batch, width, locations, layers",
        "how-it-grows",
        figure="docs/performance/scaling.png",
    ),
    "ways": PagePart("ways to A and to A s", "ways-to-a-and-to-a-s"),
    "tried": PagePart("what was tried for speed and left out", "tried-and-left-out"),
    "compiled": PagePart("what a step is made of, with and without `torch.compile`", "a-step-compiled"),
    "memory_parts": PagePart(
        "what the peak of a step's memory is made of",
        "what-the-peak-is-made-of",
        ("--problem", "autoencoder", "vgg16", "--contenders", "kbfgs", "kbfgs-bf16", "kbfgs-wide"),
    ),
    "tail": PagePart("a second pass from the first layer that learns, beside the whole", "tried-and-left-out"),
    "rounding": PagePart("directions in bfloat16", "what-bfloat16-does-to-the-direction", needs_data=True),
}


def log(name: str) -> Path:
    """Where the numbers of a part are kept."""
    return RESULTS / f"benchmarks-{name}.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options.plain(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which ones")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of torchvision's MNIST")
    args = parser.parse_args(arguments)
    failed = [name for name in tqdm(args.parts, leave=False) if not _made(name, args.data_root)]
    put_between_marks(_ROOT / RESULTS / "README.md", _MARK, listed())
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _made(name: str, data_root: Path) -> bool:
    command = [sys.executable, "-m", f"benchmarks.{name}", *PARTS[name].arguments(name, data_root)]
    return subprocess.run(command, cwd=_ROOT, stdout=subprocess.DEVNULL).returncode == 0


def listed() -> str:
    """The list of the logs that are there."""
    rows = [["file", "lines", "what", "made by", "shown in"]]
    for name, part in PARTS.items():
        if (_ROOT / log(name)).exists():
            section = f"[performance.md](../{DOCS}#{part.section})"
            rows.append([f"`{log(name).name}`", "1", part.what, f"`benchmarks.{name}`", section])
    return markdown(rows)


if __name__ == "__main__":
    raise SystemExit(main())
