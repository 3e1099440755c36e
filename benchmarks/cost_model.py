"""Seconds of an iteration in several processes, from what one computes and what messages take; and tables of these.

Four sentences are the model. Each process computes what one process computed for its share; of KFAC's inversions, those
of the fullest rank. Where processes slow each other down, all computation is slowed down as passes without messages.
Messages wait for the computation, although DistributedDataParallel sends parts of the gradient while the backward pass
goes on. A byte takes as long in a broadcast as in an all-reduce.
"""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, log2
from statistics import median
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.report import markdown
from kfqn_ext.optim.preconditioner.owners import assigned
from workloads.environment import one_line

SHARES: dict[str, Mapping[str, float]] = {
    "sgdm": CONTENDERS["sgdm"].rows["SGD-m"],
    "kbfgs": CONTENDERS["kbfgs"].rows["K-BFGS, T = 20"],
    "kfac": CONTENDERS["kfac"].rows["KFAC (10, 100)"],
}
"""The kinds of steps of which a mean one is made, by contender."""
OF = {"SGD-m": SHARES["sgdm"], "K-BFGS": SHARES["kbfgs"], "KFAC": SHARES["kfac"]}
TITLES = {"SGD-m": "SGD-m", "K-BFGS": "K-BFGS, T = 20", "KFAC": "KFAC (10, 100)"}
SEVERAL, PLANNED, MANY = (2, 4), (2, 4, 6), (16, 256, 4096)
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: how DistributedDataParallel cuts a gradient

Found = Mapping[str, Any]
"""What was measured of a problem, by number of processes."""
Wire = Mapping[str, float]
"""Seconds of an all-reduce of one number, "message", and of each further "byte"."""


def mean(member: str, kinds: Mapping[str, float]) -> float:
    """Of a mean step, from what there is of each kind."""
    return sum(share * kinds[kind] for kind, share in OF[member].items())


def measured(found: Found, member: str, ranks: int) -> float:
    """Seconds of an iteration."""
    kinds = found[str(ranks)]["members"][member]
    return mean(member, {kind: step["seconds"] for kind, step in kinds.items()})


def slowed(found: Found, member: str, ranks: int) -> dict[str, float]:
    """How much longer passes without messages took than one process's work for them, beside each kind of step."""
    beside = found[str(ranks)]["members"][member]
    work = median(step["passes_work"] for kinds in found["1"]["members"].values() for step in kinds.values())
    return {kind: step["passes_seconds"] / work for kind, step in beside.items()}


def predicted(found: Found, member: str, ranks: int, wire: Wire, slower: Mapping[str, float] | None = None) -> float:
    """Seconds of an iteration.

    Args:
        found: What was measured.
        member: One of the optimizers.
        ranks: How many processes.
        wire: Seconds of an all-reduce of one number, and of each further byte of it.
        slower: How much processes slow each other down in each kind of step; not at all, if None.
    """
    alone, sent = found["1"], found["2"]["members"][member]
    work = {kind: step["work"] for kind, step in alone["members"][member].items()}
    number = {kind: step["bytes"] for kind, step in sent.items()}
    if "inverse" in work:
        work["inverse"] = work["due"] + share_of_inversions(alone, ranks) * (work["inverse"] - work["due"])
        number["inverse"] = number["due"] + alone["factors"]

    def seconds(kind: str) -> float:
        messages = buckets(alone["gradient"]) + sent[kind]["messages"]
        compute = work[kind] * (1.0 if slower is None else slower[kind])
        return float(compute + messages * wire["message"] + (alone["gradient"] + number[kind]) * wire["byte"])

    return mean(member, {kind: seconds(kind) for kind in OF[member]})


def share_of_inversions(alone: Mapping[str, Any], ranks: int) -> float:
    """What the fullest rank inverts of all."""
    return fullest(alone["inversions"], assigned(alone["states"], [0] * ranks))


def fullest(parts: Sequence[int], owners: Sequence[int]) -> float:
    """The share of layers' parts on the fullest rank."""
    loads = dict.fromkeys(owners, 0)
    for part, owner in zip(parts, owners, strict=True):
        loads[owner] += part
    return max(loads.values()) / sum(parts)


def buckets(gradient: int) -> int:
    """How many messages a gradient is sent in."""
    return 1 + ceil(max(0, gradient - FIRST_BUCKET) / BUCKET)


def of_many(two: Wire, ranks: int) -> Wire:
    """Seconds of a message and of a byte among many ranks, from those of two.

    An all-reduce of one number goes up and down a tree, log₂ R hops each way. Of a long one each rank sends and gets
    2 (R - 1) / R of its bytes, once all are on their way.
    """
    return {"message": two["message"] * log2(ranks), "byte": two["byte"] * 2 * (ranks - 1) / ranks}


# ------------------------------------------------------------------ tables


def render(logs: Sequence[Mapping[str, Any]]) -> str:
    """All tables, of a log for each problem."""
    found = {log["problem"]: log["found"] for log in logs}
    parts = ["### Bytes", _sent(found), "### Memory", _kept(found), "### Seconds", _beside(found), _wire(found)]
    parts += ["### Many ranks, by the model alone", _many(found)]
    parts += [f"`{command}`" for command in dict.fromkeys(log["command"] for log in logs)]
    return "\n\n".join([*parts, *dict.fromkeys(one_line(log["environment"]) for log in logs)])


def _sent(found: Mapping[str, Found]) -> str:
    head = ["", "gradient, MB", "K-BFGS, kB", "formula, kB", "messages", "KFAC, MB", "formula, MB"]
    rows = [[*head, "K-BFGS ÷ gradient at T = 20"]]
    for name, of_ranks in found.items():
        alone, members = of_ranks["1"], of_ranks["2"]["members"]
        ours, kfac = members["K-BFGS"]["due"], members.get("KFAC", {}).get("due")
        row = [name, f"{alone['gradient'] / 1e6:.2f}", f"{ours['bytes'] / 1e3:.1f}", f"{alone['vectors'] / 1e3:.1f}"]
        row += [str(ours["messages"]), f"{kfac['bytes'] / 1e6:.1f}" if kfac else "–", f"{alone['factors'] / 1e6:.1f}"]
        rows.append([*row, f"{ours['bytes'] / 20 / alone['gradient']:.2%}"])
    return markdown(rows)


def _kept(found: Mapping[str, Found]) -> str:
    planned = (f"plan: fullest of {ranks}" for ranks in PLANNED)
    rows = [["", "state, MB", *(f"each of {r}" for r in SEVERAL), *planned, "waits for a step, MB"]]
    for name, of_ranks in found.items():
        alone, inputs = of_ranks["1"], of_ranks["2"]["inputs"] / 1e6
        sizes = [_megabytes(of_ranks.get(str(ranks), {}).get("kept", [])) for ranks in (1, *SEVERAL)]
        plans = [assigned(alone["states"], [0] * ranks) for ranks in PLANNED]
        shares = [f"{fullest(alone['states'], owners):.3f}" for owners in plans]
        waiting = f"{inputs:.1f}, of {alone['share']} data"
        rows.append([name, *sizes, *shares, waiting])
    return markdown(rows)


def _megabytes(kept: Sequence[int]) -> str:
    return ", ".join(f"{size / 1e6:.2f}" for size in kept) or "–"


def _beside(found: Mapping[str, Found]) -> str:
    columns = [f"{r}: {what}" for r in SEVERAL for what in ("slowed down", "predicted", "measured", "error")]
    rows = [["", "work of 1", *columns]]
    for name, of_ranks in found.items():
        for member, kinds in of_ranks["1"]["members"].items():
            row = [f"{name}, {TITLES[member]}", f"{mean(member, {k: s['work'] for k, s in kinds.items()}):.3f}"]
            for ranks in SEVERAL:
                row += _compared(of_ranks, member, ranks) if str(ranks) in of_ranks else ["–"] * 4
            rows.append(row)
    return markdown(rows)


def _compared(found: Found, member: str, ranks: int) -> list[str]:
    slower, took = slowed(found, member, ranks), measured(found, member, ranks)
    guess = predicted(found, member, ranks, found[str(ranks)]["slowed"], slower)
    return [f"{mean(member, slower):.1f}", f"{guess:.3f}", f"{took:.3f}", f"{guess / took - 1:+.0%}"]


def wire_of(found: Mapping[str, Found], ranks: int, which: Callable[[list[float]], float]) -> Wire:
    """Seconds of a message and of a byte, of all the times that they were measured among some ranks."""
    wires = [one[str(ranks)][w] for one in found.values() if str(ranks) in one for w in ("messages", "slowed")]
    return {what: which([wire[what] for wire in wires]) for what in ("message", "byte")}


def _wire(found: Mapping[str, Found]) -> str:
    def told(ranks: int, which: Callable[[list[float]], float]) -> str:
        wire = wire_of(found, ranks, which)
        return f"{1e3 * wire['message']:.2f} ms and {1e-6 / wire['byte']:.0f} MB/s in {ranks}"

    some = [ranks for ranks in SEVERAL if any(str(ranks) in of_ranks for of_ranks in found.values())]
    best, worst = (" and ".join(told(ranks, which) for ranks in some) for which in (min, max))
    return f"An all-reduce takes {best} processes at best, and {worst} processes where they are slowed down most."


def _many(found: Mapping[str, Found]) -> str:
    rows = [["", *(f"{ranks} ranks" for ranks in MANY), f"÷ SGD-m's, {MANY[-1]} ranks"]]
    wires = [of_many(wire_of(found, 2, min), ranks) for ranks in MANY]
    for name, of_ranks in found.items():
        base = predicted(of_ranks, "SGD-m", MANY[-1], wires[-1])
        for member in of_ranks["1"]["members"]:
            times = [predicted(of_ranks, member, ranks, wire) for ranks, wire in zip(MANY, wires, strict=True)]
            rows.append([f"{name}, {TITLES[member]}", *(f"{t:.3f}" for t in times), f"{times[-1] / base:.2f}"])
    return markdown(rows)
