"""CPU seconds to given losses, ours beside peers: ``python -m benchmarks.time_to_loss``.

Every run has the same seconds of its process, in one thread, and its rate falls to zero over them as a cosine. What is
tuned tries a small grid with the first seed, and the setting with the lowest last loss runs with the other seeds too.
Runs go round: each optimizer's first setting on each problem, then the second, and so on. So a busy hour of the machine
is nobody's own. Finished runs are lines of a log, and a command that was stopped goes on.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import options
from benchmarks.time_to_loss.grids import OPTIMIZERS
from benchmarks.time_to_loss.problems import RACES
from benchmarks.time_to_loss.race import outcome
from benchmarks.time_to_loss.report import render
from benchmarks.time_to_loss.study import Found, RaceStudy, key
from benchmarks.untuned.data import Source
from benchmarks.untuned.log import held
from benchmarks.untuned.working import start_process
from workloads import environment, records


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.plain(__doc__)
    options.add_outputs(parser)
    parser.add_argument("--problem", nargs="+", choices=RACES, default=list(RACES), help="which ones")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), help="which ones")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="the first one is tuned on")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of torchvision's MNIST")
    parser.add_argument("--log", type=Path, default=Path("runs/time-to-loss.jsonl"), help="file of finished runs")
    parser.add_argument("--report-only", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="digits and few seconds, to see that it runs")
    args = parser.parse_args(arguments)
    study = RaceStudy(args.problem, args.optimizers, args.seeds, args.quick)
    with held(args.log):
        found = {key(record): record for record in records.read(args.log)}
        if not args.report_only:
            _work(study, found, args.log, Source(args.data_root, args.quick))
    start = environment.origin("benchmarks.time_to_loss", torch.device("cpu"))
    results = {**start, **study.results(found)}
    options.write(args.json, results)
    options.show(args.docs, "time to loss", options.text(results, render))


def _work(study: RaceStudy, found: Found, log: Path, source: Source) -> None:
    start_process()
    with tqdm(total=study.number, unit=" runs", leave=False) as bar:
        for run in study.runs(found):
            bar.set_postfix_str(f"{run.problem}, {run.optimizer}")
            if key(run) not in found:
                found[key(run)] = outcome(run, source)
                records.append(log, found[key(run)])
            bar.update()
