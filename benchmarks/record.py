"""Ratios that later states of the package are held to: ``python -m benchmarks.record`` writes what a slow test reads.

Times of our own steps and extraction only: what others' packages do is not ours to watch.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import options, run
from benchmarks.turns import prepare
from workloads import environment

RECORDED = Path(__file__).parents[1] / "results" / "benchmarks-record.jsonl"
TOLERANCE = 0.15
_WATCHED = ("kbfgs", "kbfgs-bf16", "kfac-bf16")
_WATCHED_QUANTITIES = ("KBFGSQuantities(probe=…)",)


def ratios(problems: Iterable[str], turns: int, quick: bool, device: torch.device) -> dict[str, float]:
    """Measure our ratios to SGD-m's step and to a plain forward-backward pass, by problem and row."""
    found: dict[str, float] = {}
    for problem in problems:
        times, errors = run.steps(problem, [run.BASE, *_WATCHED], turns, quick, device)
        if errors or times.errors:
            raise RuntimeError(f"{problem}: {errors | times.errors}")
        rows = {title: value for name in _WATCHED for title, value in run.mean_steps(name, times).items()}
        rows |= run.extraction(problem, _WATCHED_QUANTITIES, turns, quick, device)
        found |= {f"{problem}: {title}": value for title, value in rows.items()}
    return found


def regressions(measured: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """What is slower than recorded by more than the tolerance, or was recorded and is no longer measured."""
    found = []
    for name, before in recorded.items():
        now = measured.get(name)
        if now is None:
            found.append(f"{name}: {before:.2f} was recorded, and it is not measured any more")
        elif now > before * (1 + TOLERANCE):
            found.append(f"{name}: {now:.2f}, recorded {before:.2f}")
    return found


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--json", type=Path, default=RECORDED, help="file for the numbers")
    args = parser.parse_args()
    device = prepare(args.device)
    measured = ratios(tqdm(args.problem, leave=False), args.turns, args.quick, device)
    options.write(args.json, {**environment.origin("benchmarks.record", device), "ratios": measured})
    print(json.dumps(measured, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
