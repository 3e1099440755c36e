"""What the commands of this benchmark share: options, the work and its bar, and what each result begins with."""

import argparse
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import options
from benchmarks.untuned import log, working
from benchmarks.untuned.data import Source
from benchmarks.untuned.log import Found, Trial
from benchmarks.untuned.problem import SmallProblem
from workloads import environment, records
from workloads.records import Record


@dataclass(frozen=True)
class Work:
    """What a command runs.

    Attributes:
        problems: Their data are loaded once before several processes would download them.
        due: What can run, given what is found.
        mine: The command's own of the finished runs, as a log may have others.
        steps: Of all runs.
    """

    problems: Sequence[SmallProblem]
    due: Callable[[Found], Iterable[Trial]]
    mine: Callable[[Found], list[Record]]
    steps: int


def fixed(problems: Sequence[SmallProblem], trials: Sequence[Trial]) -> Work:
    """Runs that do not depend on each other."""
    order = shuffled(trials)
    return Work(
        problems,
        lambda found: (trial for trial in order if trial.key not in found),
        lambda found: [found[trial.key] for trial in trials if trial.key in found],
        sum(trial.steps for trial in trials),
    )


def shuffled(items: Sequence[Any]) -> list[Any]:
    """In random order, so that the bar's estimate holds, and nobody's seconds are of a busy hour."""
    return random.Random(0).sample(items, len(items))


def parser(doc: str | None, name: str, figure: bool = False) -> argparse.ArgumentParser:
    """A parser with the options that all commands have; the log is named after the command."""
    parser = options.plain(doc)
    options.add_outputs(parser, figure)
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of torchvision's MNIST")
    parser.add_argument("--log", type=Path, default=Path(f"runs/{name}.jsonl"), help="file of finished runs")
    parser.add_argument("--known", type=Path, nargs="+", default=[], help="files of runs that need not run again")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="a few steps on digits, to see that it runs")
    return parser


def run(args: argparse.Namespace, work: Work, one: Callable[[Trial, Source], Record] = working.one) -> Found:
    """Run what is missing, unless only a report is wanted, and return all that is finished."""
    with log.held(args.log):
        found = log.read([*args.known, args.log], args.quick)
        if not args.report_only:
            _work(args, work, found, one)
    return found


def _work(args: argparse.Namespace, work: Work, found: Found, one: Callable[[Trial, Source], Record]) -> None:
    """Run what is due, behind a bar that counts steps."""
    source, start = Source(args.data, args.quick), time.perf_counter()
    for problem in work.problems:
        problem.data(source)
    with tqdm(total=work.steps, unit=" steps", unit_scale=True, leave=False) as bar:
        bar.update(sum(record["steps"] for record in work.mine(found)))
        bar.refresh()

        def finished(record: Record) -> None:
            bar.set_postfix_str(f"{record['problem']}, {record['optimizer']}")
            bar.update(record["steps"])

        working.work_off(work.due, found, args.log, partial(one, source=source), args.jobs, finished)
    print(f"{(time.perf_counter() - start) / 60:.1f} minutes with {args.jobs} job(s).")


def results(args: argparse.Namespace, command: str, records: Sequence[Record]) -> dict[str, Any]:
    """What every result begins with, as a JSON object: its origin, and what it cost."""
    return {
        **environment.origin(f"benchmarks.{command}", torch.device("cpu")),
        "quick": args.quick,
        "cost": {
            "runs": len(records),
            "seconds": sum(record["seconds"] for record in records),
            "wall": sum(record["wall"] for record in records),
        },
    }


def write_beside(path: Path | None, results: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Write results as a line of a file, where one is named, in the place of the line that has the same under a key.

    Returns:
        All lines, in the order of what they have there.
    """
    others = [] if path is None else [line for line in records.read(path) if line[key] != results[key]]
    lines = sorted([*others, results], key=lambda line: line[key])
    if path is not None:
        records.replace(path, lines)
    return lines
