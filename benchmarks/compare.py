"""Ours beside torch's and other packages' optimizers: ``python -m benchmarks``.

Times of steps in steps of torch's SGD with momentum, peak memory, size of state, and what it takes to extract curvature
in a backward pass. Steps of all optimizers run in turns of random order in one process and one thread; the median over
turns counts. Memory is that of a fresh process for each. What does not run is a row that says why.
"""

from collections.abc import Sequence

from tqdm import tqdm

from benchmarks import options, run
from benchmarks.contenders import CONTENDERS
from benchmarks.report import draw, render
from benchmarks.turns import prepare
from workloads import environment


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__)
    options.add_outputs(parser, figure=True)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="which ones")
    parser.add_argument("--part", default="bench", help="name of the marks in that file")
    args = parser.parse_args(arguments)
    device = prepare(args.device)
    results = {**environment.origin("benchmarks", device), "quick": args.quick, "problems": {}}
    for name in tqdm(args.problem, leave=False):
        results["problems"][name] = run.measure(name, args.contenders, args.turns, args.quick, device)
        options.write(args.json, results)  # each at once: a large network takes its time
    if args.figure is not None:
        draw(results, args.figure)
    options.show(args.docs, args.part, render(results))
