"""What several processes send, keep and take: ``python -m benchmarks.processes``.

One, two and four processes of one thread train a network under gloo, each with an eighth of the usual minibatch. Bytes
and messages of a curvature update are counted, and so is what a rank keeps. Timed are all-reduces, and the steps of
SGD-m, K-BFGS and KFAC. Beside each step the network's passes are timed without any message. They tell how much the
processes, and other programs, slow each other down.

:mod:`benchmarks.cost_model` predicts an iteration of several processes from the steps of one and from these messages.
It stands beside what was measured, and then alone, for as many ranks as there is no machine for.
"""

import datetime
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from benchmarks import cost_model, options
from benchmarks.contenders import CONTENDERS
from benchmarks.memory import held_bytes
from benchmarks.problems import PROBLEMS, QUICK, Setup, set_up
from kfqn_ext.optim import KBFGS
from kfqn_ext.optim.passes.ranks import SeveralProcesses
from workloads import environment, records
from workloads.workload import DAMPING, LR

RANKS, SHARE = (1, 2, 4), 8
SLOW = {"inverse": 1}  # turns of what takes long
MEMBERS = {"SGD-m": "sgdm", "K-BFGS": "kbfgs", "KFAC": "kfac"}
LARGE = 1 << 22  # numbers of the message that tells the bandwidth
CPU = torch.device("cpu")


def work(rank: int, ranks: int, problem: str, members: Sequence[str], quick: bool, steps: int, folder: str) -> None:
    """One rank: measure everything, and let the first write it down."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=600)
    meeting = f"file://{folder}/meet-{problem}-{ranks}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=limit)
    setup = set_up((QUICK if quick else PROBLEMS)[problem], CPU)
    found: dict[str, Any] = {"messages": wire(min), "slowed": wire(median)}
    found["members"] = {member: steps_of(MEMBERS[member], setup, steps) for member in members}
    found |= kept(setup)
    if rank == 0:
        torch.save(found, Path(folder, f"{problem}-{ranks}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


def wire(of_turns: Callable[[list[float]], float]) -> dict[str, float]:
    """Seconds of an all-reduce of one number, and of each further byte of one of many."""

    def seconds(tensor: Tensor, turns: int) -> float:
        return of_turns([timed(partial(distributed.all_reduce, tensor))["seconds"] for _ in range(turns)])

    message, long = seconds(torch.zeros(1), 100), seconds(torch.zeros(LARGE), 7)
    return {"message": message, "byte": max(0.0, long - message) / (4 * LARGE)}


def in_processes(setup: Setup) -> Setup:
    """A fresh network with a share of the minibatch, in a wrapper where there are several processes."""
    setup = set_up(setup.workload, CPU)
    size = max(1, len(setup.x) // SHARE)
    several = distributed.get_world_size() > 1
    model = DistributedDataParallel(setup.model) if several else setup.model
    return replace(setup, model=model, x=setup.x[:size], y=setup.y[:size])


def steps_of(contender: str, setup: Setup, steps: int) -> dict[str, dict[str, float]]:
    """Seconds, bytes and messages of each kind of step that makes up a mean one, and of passes without messages."""
    here = in_processes(setup)
    ready, plain = CONTENDERS[contender].build(here), replace(here, model=set_up(setup.workload, CPU).model)
    ranks = ready.holds._passes.ranks if hasattr(ready.holds, "_passes") else None
    found = {}
    for kind in cost_model.SHARES[contender]:
        times, beside, sent = [], [], []
        for _ in range(SLOW.get(kind, steps)):
            before = counts(ranks)
            times.append(timed(ready.steps[kind]))
            sent.append(tuple(b - a for a, b in zip(before, counts(ranks), strict=True)))
            beside.append(timed(partial(together, plain.batch)))
        number, messages = min(sent)  # now and then an update looks again at what stands before a normalization
        found[kind] = {"bytes": number, "messages": messages, **middle(times)}
        found[kind] |= {f"passes_{name}": value for name, value in middle(beside).items()}
    return found


def together(run: Callable[[], object]) -> None:
    """Run, and wait for all."""
    run()
    distributed.barrier()


def timed(run: Callable[[], object]) -> dict[str, float]:
    """Seconds, from when all ranks are there, and seconds of this process's own work."""
    distributed.barrier()
    start, used = time.perf_counter(), time.process_time()
    run()
    return {"seconds": time.perf_counter() - start, "work": time.process_time() - used}


def middle(times: list[dict[str, float]]) -> dict[str, float]:
    """Medians."""
    return {name: median(one[name] for one in times) for name in ("seconds", "work")}


def counts(ranks: Any) -> tuple[int, int]:
    return (ranks.bytes_sent, ranks.messages) if isinstance(ranks, SeveralProcesses) else (0, 0)


def kept(setup: Setup) -> dict[str, Any]:
    """Bytes that a rank keeps: the layers' state, divided where there are several, and what waits for a step."""
    here = in_processes(setup)
    ranks = distributed.get_world_size()
    optimizer = KBFGS.as_printed(here.model, lr=LR, damping=DAMPING, curvature_update_freq=1, shard_state=ranks > 1)
    for _ in range(2):
        optimizer.step(here.batch)
    states = [optimizer.state[weight] for weight in optimizer._planned.layers]
    own = torch.tensor(sum(map(size_of, states)))
    all_of_them = [torch.zeros_like(own) for _ in range(ranks)]
    distributed.all_gather(all_of_them, own)
    found = {"kept": [int(number) for number in all_of_them]}
    return found | ({"inputs": waiting(optimizer, here)} if ranks > 1 else about(states, here))


def waiting(optimizer: KBFGS, setup: Setup) -> int:
    """Bytes of a share that wait between the backward pass and the step, where curvature is due."""
    before = held_bytes(optimizer, setup)
    with optimizer.first_pass():
        setup.batch()
    return held_bytes(optimizer, setup) - before


def about(states: list[dict[str, Tensor]], here: Setup) -> dict[str, Any]:
    """What follows from the network: the bytes of the formulas, and what of each layer is divided."""
    shapes = [state["momentum"].shape for state in states]
    learns = [bool(state["pairs_seen_G"].any()) for state in states]  # not before a normalization
    widths = [(prod(shape[:-2]) * shape[-1], prod(shape[:-2]) * shape[-2]) for shape in shapes]
    return {
        "gradient": 4 * sum(p.numel() for p in here.model.parameters()),
        "vectors": 4 * sum(2 * d_in + 5 * d_out * own for (d_in, d_out), own in zip(widths, learns, strict=True)),
        "factors": 4 * sum(prod(s[:-2]) * (s[-1] ** 2 + s[-2] ** 2) for s in shapes),
        "states": [size_of(state) for state in states],
        "inversions": [prod(s[:-2]) * (s[-1] ** 3 + s[-2] ** 3) for s in shapes],
        "share": len(here.x),
    }


def size_of(state: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in state.values())


def measured(problem: str, args: Namespace) -> dict[str, Any]:
    """What was found of a problem, by number of processes."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted({1, 2, *args.ranks}):
            given = ranks, problem, args.members, args.quick, args.steps, folder
            multiprocessing.spawn(work, given, nprocs=ranks)
            found[str(ranks)] = torch.load(Path(folder, f"{problem}-{ranks}.pt"), weights_only=True)
    return found


def main() -> None:
    parser = options.plain(__doc__)
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="which ones")
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=list(RANKS), help="how many processes")
    parser.add_argument("--members", nargs="+", choices=MEMBERS, default=list(MEMBERS), help="which optimizers")
    parser.add_argument("--steps", type=int, default=5, help="of each kind and optimizer; medians count")
    parser.add_argument("--quick", action="store_true", help="small networks, to see that it runs")
    options.add_outputs(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logs = records.read(args.json) if args.json is not None and args.json.exists() else []
    logs = {log["problem"]: log for log in logs}  # those of other problems stay
    for problem in args.problem:
        about_it = {"problem": problem, "quick": args.quick, "found": measured(problem, args)}
        logs[problem] = {**environment.origin("benchmarks.processes", CPU), **about_it}
        if args.json is not None:
            records.replace(args.json, list(logs.values()))
    options.show(args.docs, "processes", cost_model.render(list(logs.values())))


if __name__ == "__main__":
    sys.exit(main())
