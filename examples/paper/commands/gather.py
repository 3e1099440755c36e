"""``gather``: many runs as one file, a line a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from examples.paper.sources import finished
from workloads import records


@dataclass(frozen=True)
class Gather:
    """Gather finished runs in one file, a line a run, which `report` and `examples.paper.rows` read.

    Example: python -m examples.paper gather runs/*.jsonl --out results/mnist-autoencoder.jsonl
    """

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of `table`, logs of `run`, files of `gather`."""
    out: Path
    """File of JSON lines. Runs that it has stay, but for those that are given again."""

    def main(self) -> None:
        missing = [str(path) for path in self.paths if not path.exists()]
        if missing or not self.paths:
            raise SystemExit(f"Not there: {', '.join(missing)}" if missing else "Name at least one directory or file.")
        try:
            lines = finished([self.out, *self.paths])
        except ValueError as error:
            raise SystemExit(error.args[0]) from None
        tables = sorted({line.get("table", "no table") for line in lines})
        if len(tables) > 1:
            raise SystemExit(f"{self.out} would hold runs of {' and '.join(tables)}, and a file has one table.")
        records.replace(self.out, lines)
        print(f"{len(lines)} runs in {self.out}.")
