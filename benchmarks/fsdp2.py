"""What a step sends under FSDP2 beside FSDP2's own messages: ``python -m benchmarks.fsdp2``.

Two processes under gloo divide one network, by layer. Counted at the calls stand the bytes of rows that a step moves,
gradients to the owners and steps back, and those of a curvature update; beside them the formulas. Bytes are those that
all processes give together, for they have different layers. Times are not measured here.
"""

import datetime
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard

from benchmarks import options
from benchmarks.problems import PROBLEMS, QUICK, set_up
from benchmarks.report import markdown
from kfqn_ext._torch import row_counts
from kfqn_ext.optim import KBFGS
from workloads.objective import minibatch

RANKS, SHARE = 2, 32


@dataclass(frozen=True)
class Traffic:
    """What one process gives to others.

    Attributes:
        rows: Bytes of rows, of gradients and of steps.
        row_messages: Collectives that move rows.
        rest: Bytes of all other messages.
        rest_messages: Their number.
    """

    rows: int
    row_messages: int
    rest: int
    rest_messages: int

    def __sub__(self, before: "Traffic") -> "Traffic":
        """What was sent since."""
        return Traffic(*(b - a for a, b in zip(vars(before).values(), vars(self).values(), strict=True)))


def sent(optimizer: Any) -> Traffic:
    """What this process has given so far, as it was counted at the calls."""
    ranks = optimizer._passes.ranks
    return Traffic(ranks.rows.bytes_sent, ranks.rows.messages, ranks.bytes_sent, ranks.messages)


def rows_of_a_step(optimizer: Any) -> tuple[int, int]:
    """By formula, bytes of rows of gradients and of rows of steps that this process gives in a step.

    Of a layer that another one owns it gives the gradient's rows that it has. Of its own it gives all rows of the step
    but those that it has.
    """
    owners, plan = optimizer._preconditioner.owners, optimizer._planned
    rank, size = owners.mail.rank, owners.mail.size
    gradients = steps = 0
    for layer in plan.layers.values():
        for p in (layer.weight, layer.bias):
            if p is not None and p.grad is not None:
                here = row_counts(len(p), size)[rank] * (p.numel() // len(p)) * p.element_size()
                whole = p.numel() * p.element_size()
                gradients += 0 if owners.owns(layer) else here
                steps += whole - here if owners.owns(layer) else 0
    return gradients, steps


def update_of_kbfgs(optimizer: Any) -> int:
    """By formula, bytes that this process gives to the messages of a curvature update: 3 d_in + 6 d_out, and own s.

    They are ā, ∂h̄ and its noise of both passes, A s, and h̄ of both passes, which follows from ā and the rows of W. A
    layer before a normalization gives ā and A s alone.
    """
    owners, numbers = optimizer._preconditioner.owners, 0
    for block in optimizer._blocks():
        layer, learns = block.layer, bool(optimizer._preconditioner.recipe_of(block).second)
        blocks = math.prod(layer.geometry.blocks)
        d_in, d_out = blocks * layer.geometry.d_in, blocks * layer.geometry.d_out
        both = 3 * d_in + 6 * d_out if learns else 2 * d_in
        numbers += (both + (d_in if owners.owns(layer) else 0)) * torch.finfo(layer.weight.dtype).bits // 8
    return numbers


def work(rank: int, problems: list[str], quick: bool, folder: str) -> None:
    """One rank: count everything, and let the first write it down."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=600)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=limit
    )
    found = {name: count(name, quick) for name in problems}
    if rank == 0:
        torch.save(found, Path(folder, "found.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


def count(name: str, quick: bool) -> dict[str, list[int]]:
    """Counts and formulas of a step without an update and of one with, summed over processes."""
    setup = set_up((QUICK if quick else PROBLEMS)[name], torch.device("cpu"))
    size, gradient = max(1, len(setup.x) // SHARE), 4 * sum(p.numel() for p in setup.model.parameters())
    for layer in setup.model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            fully_shard(layer)
    model = fully_shard(setup.model)
    optimizer, steps = KBFGS.as_printed(model, lr=1e-4, curvature_update_freq=2), []
    for _ in range(6):  # the last one with an update
        before = sent(optimizer)
        optimizer.step(minibatch(model, setup.workload.loss, setup.x[:size], setup.y[:size]))
        steps.append(sent(optimizer) - before)
    idle, due = steps[-2:]
    gradients, moves = rows_of_a_step(optimizer)
    of_rank = [idle.rows, gradients + moves, due.rest - idle.rest, update_of_kbfgs(optimizer)]
    every = torch.tensor(of_rank, dtype=torch.int64)
    distributed.all_reduce(every)
    messages = [idle.row_messages, idle.rest_messages, due.rest_messages - idle.rest_messages]
    return {"bytes": [gradient, *every.tolist()], "messages": messages}


def render(results: dict[str, Any]) -> str:
    """A table."""
    rows = [
        [
            "", "gradient, MB", "rows in a step, MB", "formula, MB", "messages", "others",
            "update, kB", "formula, kB", "messages",
        ]
    ]  # fmt: skip
    for name, found in results["found"].items():
        gradient, moved, formula, update, of_update = found["bytes"]
        of_rows, others, more = map(str, found["messages"])
        rows.append(
            [
                name, f"{gradient / 1e6:.2f}", f"{moved / 1e6:.2f}", f"{formula / 1e6:.2f}", of_rows, others,
                f"{update / 1e3:.1f}", f"{of_update / 1e3:.1f}", more,
            ]
        )  # fmt: skip
    return "\n\n".join([markdown(rows), f"`{results['command']}`"])


def main() -> None:
    parser = options.plain(__doc__)
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS), help="which ones")
    parser.add_argument("--quick", action="store_true", help="small networks, to see that it runs")
    options.add_outputs(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (args.problem, args.quick, folder), nprocs=RANKS)
        found = torch.load(Path(folder, "found.pt"), weights_only=True)
    options.finish(args, "fsdp2", torch.device("cpu"), {"quick": args.quick, "found": found}, render)


if __name__ == "__main__":
    sys.exit(main())
