"""All that is to be known of a GPU, at once: ``make gpu-check``.

Each section is a file beside this one. One that fails is noted, and the others go on. It takes less than eight minutes:
what has not begun by then is left out. Without a GPU it says so and succeeds; ``--device cpu --quick`` shows that every
section runs.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import options
from benchmarks.gpu import capture, forms, kernels, peaks, precision, ratios, suite, training, two, waits
from benchmarks.gpu.place import Place
from benchmarks.turns import prepare
from workloads import environment, records

# The tests come last: they take what time is left, and have a process of their own.
SECTIONS: dict[str, ModuleType] = {
    "Ratios of a step": ratios,
    "Kernels of a step": kernels,
    "Waits for the device": waits,
    "Peak memory": peaks,
    "A step as a CUDA graph": capture,
    "TF32 and bfloat16": precision,
    "Ways to A and A s": forms,
    "Training": training,
    "Two processes": two,
    "Tests": suite,
}
_SECONDS = 460.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options.plain(__doc__)
    parser.add_argument("--json", type=Path, default=Path("runs/gpu-check.json"), help="file for the numbers")
    parser.add_argument("--page", type=Path, default=Path("runs/gpu-check.md"), help="file for the page")
    parser.add_argument("--data-root", type=Path, default=Path("data"), help="folder of torchvision's MNIST")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="which ones")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small networks")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: no CUDA device here, nothing was checked.")
        return 0
    place = Place(prepare(args.device), args.quick, args.data_root, time.perf_counter() + _SECONDS)
    results = {**environment.origin("benchmarks.gpu", place.device), "sections": {}}
    for title in tqdm(args.sections, leave=False):
        results["sections"][title] = run(SECTIONS[title].measure, place)
        records.replace(args.json, [results])
        records.write_atomically(args.page, render(results).encode())
    print(render(results))
    failed = [title for title, section in results["sections"].items() if section["failures"]]
    print(f"gpu-check: {', '.join(failed) or 'nothing'} failed; {args.json} and {args.page} have the numbers.")
    return int(bool(failed))


def run(measure: Callable[[Place], dict[str, Any]], place: Place) -> dict[str, Any]:
    """What a section found, the seconds that it took, and what failed."""
    if place.seconds_left <= 0:
        return {"found": None, "seconds": 0.0, "failures": ["left out: the time was over"]}
    start, found = time.perf_counter(), None
    place.failures.clear()
    try:
        found = measure(place)
    except Exception:
        place.failures.append(traceback.format_exc())
    return {"found": found, "seconds": time.perf_counter() - start, "failures": list(place.failures)}


def render(results: dict[str, Any]) -> str:
    """The page."""
    blocks = ["# A GPU", environment.one_line(results["environment"])]
    for title, section in results["sections"].items():
        blocks.append(f"## {title}\n\n{section['seconds']:.1f} s.")
        if section["found"] is not None:
            blocks.append(SECTIONS[title].render(section["found"]))
        blocks += [f"Failed:\n\n```\n{failure.strip()}\n```" for failure in section["failures"]]
    return "\n\n".join(blocks) + "\n"
