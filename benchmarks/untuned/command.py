"""Optimizers that are used without tuning, against well-tuned peers: ``python -m benchmarks.untuned``.

Seven small problems are there for choices to be made on (``--set choice``), others, of other families, to be run once
when all is chosen (``--set held-out``). Every method gets the same parameters to start from and the same minibatches,
and its rate falls to zero as a cosine.

The protocol: each peer has a grid of five settings. All five run at 200 steps with seed 0; the best one and its two
neighbours (at an end of the grid, the three at that end) run again at 800 steps with seed 0; then the best one of each
length runs with seeds 1 and 2, and the next best one where it fails with one of them. So all peers have equally many
trials, and the seed that they are tuned on counts in their result. What has no grid runs once for each length and seed.
The best is the one with the lowest score: the mean training loss of the last ten minibatches. A run has diverged where
a loss is not finite or the score is more than twice the first loss.

Seconds are those of the process, in steps only, with one thread. "In Adam's seconds, cut" is what a method's curve,
between its points on a straight line, has reached by the time that tuned Adam needed for all its steps with the same
seed; its rate is still high by then. What is not tuned also runs "shorter": for as many steps as take Adam's seconds,
with a rate that falls to zero in these.

Three studies stand beside it: :mod:`~benchmarks.untuned.robust` changes the defaults, :mod:`~benchmarks.untuned.widths`
the networks' widths, and :mod:`~benchmarks.untuned.autoencoder` trains the paper's network for many epochs.

Each finished run is a line of the log, and a program that was stopped goes on where it was. The log of peers can be
kept and passed as ``--known``, so that only what has changed runs again.
"""

import argparse
from collections.abc import Iterator, Sequence

from benchmarks import options
from benchmarks.untuned import report, scores, study
from benchmarks.untuned.lists import ENTRIES, PROBLEMS, SETS
from benchmarks.untuned.log import Found, Trial
from benchmarks.untuned.protocol import Protocol
from workloads.records import Record

_LENGTHS, _SEEDS = (200, 800), (0, 1, 2)
_QUICK_LENGTHS, _QUICK_SEEDS = (2, 4), (0,)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    _fill(args)
    protocol = Protocol(sorted(args.lengths), args.seeds)
    work = _work(args, protocol)
    found = study.run(args, work)
    results = {
        **study.results(args, "untuned", work.mine(found)),
        "lengths": list(protocol.lengths),
        "seeds": list(protocol.seeds),
        "problems": {name: PROBLEMS[name].title for name in args.problems},
        "optimizers": {name: ENTRIES[name].title for name in args.optimizers},
        "cells": scores.cells(args.problems, {name: ENTRIES[name] for name in args.optimizers}, protocol, found),
    }
    options.write(args.json, results)
    if args.figure is not None:
        report.draw(results, args.figure)
    options.show(args.docs, f"untuned {args.set}", report.render(results))


def _parser() -> argparse.ArgumentParser:
    parser = study.parser(__doc__, "untuned", figure=True)
    parser.add_argument("--set", choices=SETS, default="choice", help="of problems")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, metavar="NAME", help="instead of a whole set")
    parser.add_argument("--optimizers", nargs="+", choices=ENTRIES, default=list(ENTRIES), help="which ones")
    parser.add_argument("--lengths", nargs="+", type=int, help="numbers of steps; settings are tuned at the smallest")
    parser.add_argument("--seeds", nargs="+", type=int, help="settings are tuned on the first")
    return parser


def _fill(args: argparse.Namespace) -> None:
    """Set what was left out and depends on the rest."""
    args.problems = args.problems or list(SETS[args.set])
    args.lengths = args.lengths or (_QUICK_LENGTHS if args.quick else _LENGTHS)
    args.seeds = args.seeds or (_QUICK_SEEDS if args.quick else _SEEDS)


def _work(args: argparse.Namespace, protocol: Protocol) -> study.Work:
    """What the protocol asks for, and how many steps that is."""
    chains = study.shuffled([(problem, name) for problem in args.problems for name in args.optimizers])

    def due(found: Found) -> Iterator[Trial]:
        for problem, name in chains:
            yield from protocol.due(problem, name, ENTRIES[name], found)

    def mine(found: Found) -> list[Record]:
        return [r for r in found.values() if r["problem"] in args.problems and r["optimizer"] in args.optimizers]

    steps = len(args.problems) * sum(protocol.steps(ENTRIES[name]) for name in args.optimizers)
    return study.Work([PROBLEMS[name] for name in args.problems], due, mine, steps)
