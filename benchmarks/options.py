"""Options that the benchmarks share."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.marks import put_between_marks
from benchmarks.problems import PROBLEMS
from workloads import environment, records


def plain(doc: str | None) -> argparse.ArgumentParser:
    """A parser without any options."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parser(doc: str | None, problems: bool = True) -> argparse.ArgumentParser:
    """A parser with the options of what is measured in turns."""
    parser = plain(doc)
    if problems:
        parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="which ones")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", type=int, default=7, help="how often everything is measured; medians count")
    parser.add_argument("--quick", action="store_true", help="small networks, to see that it runs")
    return parser


def add_outputs(parser: argparse.ArgumentParser, figure: bool = False) -> None:
    """Add the options of those that fill a page, and of those that draw a figure too."""
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--docs", type=Path, help="file whose marks receive the tables")
    if figure:
        parser.add_argument("--figure", type=Path, help="file for the figure")


def write(path: Path | None, results: dict[str, Any]) -> None:
    """Write results as one JSON line, where a file is named: such files can be put behind each other."""
    if path is not None:
        records.replace(path, [results])


def show(docs: Path | None, part: str, text: str) -> None:
    """Print a text, and put it between the marks of a part, where a file is named."""
    if docs is not None:
        put_between_marks(docs, part, text)
    print(text)


def finish(
    args: argparse.Namespace, part: str, device: torch.device, numbers: dict[str, Any], render: Callable[..., str]
) -> None:
    """Write the numbers of a part of the page with what they depend on, and show what a function makes of them."""
    results = {**environment.origin(f"benchmarks.{part}", device), **numbers}
    write(args.json, results)
    show(args.docs, part, text(results, render))


def text(results: dict[str, Any], render: Callable[..., str]) -> str:
    """What the page shows: what a function makes of the numbers, and where they were measured."""
    return f"{render(results)}\n\n{environment.one_line(results['environment'])}"
