"""Seconds of an iteration in several processes, from what one computes and what messages take; and tables of these.

Three sentences are the model. Each process computes what one process computed for its share. Where there are more
processes than cores, they take turns. Messages wait for the computation, although DistributedDataParallel sends parts
of the gradient while the backward pass goes on.
"""

from collections.abc import Mapping, Sequence
from math import ceil, log2
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.report import markdown
from workloads.environment import one_line

SHARES: dict[str, Mapping[str, float]] = {
    "sgdm": CONTENDERS["sgdm"].rows["SGD-m"],
    "kbfgs": CONTENDERS["kbfgs"].rows["K-BFGS, T = 20"],
    "kfac": CONTENDERS["kfac"].rows["KFAC (10, 100)"],
}
"""The kinds of steps of which a mean one is made, by contender."""
OF = {"SGD-m": SHARES["sgdm"], "K-BFGS": SHARES["kbfgs"], "KFAC": SHARES["kfac"]}
TITLES = {"SGD-m": "SGD-m", "K-BFGS": "K-BFGS, T = 20", "KFAC": "KFAC (10, 100)"}
SEVERAL, MANY = (2, 4), (16, 256, 4096)
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: how DistributedDataParallel cuts a gradient

Found = Mapping[str, Any]
"""What was measured of a problem, by number of processes."""


def mean(member: str, kinds: Mapping[str, float]) -> float:
    """Of a mean step, from what there is of each kind."""
    return sum(share * kinds[kind] for kind, share in OF[member].items())


def measured(found: Found, member: str, ranks: int) -> float:
    """Seconds of an iteration."""
    kinds = found[str(ranks)]["members"][member]
    return mean(member, {kind: step["seconds"] for kind, step in kinds.items()})


def predicted(found: Found, member: str, message: float, byte: float, turns: float = 1) -> float:
    """Seconds of an iteration.

    Args:
        found: What was measured.
        member: One of the optimizers.
        message: Seconds of an all-reduce of one number.
        byte: Seconds of each further byte of it.
        turns: How many processes there are for each core, at least 1.
    """
    alone, sent = found["1"], found["2"]["members"][member]

    def seconds(kind: str) -> float:
        messages = buckets(alone["gradient"]) + sent[kind]["messages"]
        number = alone["gradient"] + sent[kind]["bytes"]
        return float(turns * alone["members"][member][kind]["seconds"] + messages * message + number * byte)

    return mean(member, {kind: seconds(kind) for kind in OF[member]})


def buckets(gradient: int) -> int:
    """How many messages a gradient is sent in."""
    return 1 + ceil(max(0, gradient - FIRST_BUCKET) / BUCKET)


def of_many(two: Mapping[str, float], ranks: int) -> tuple[float, float]:
    """Seconds of a message and of a byte among many ranks, from those of two.

    An all-reduce of one number goes up and down a tree, log₂ R hops each way. Of a long one each rank sends and gets
    2 (R - 1) / R of its bytes, once all are on their way.
    """
    return two["message"] * log2(ranks), two["byte"] * 2 * (ranks - 1) / ranks


# ------------------------------------------------------------------ tables


def render(logs: Sequence[Mapping[str, Any]]) -> str:
    """All tables, of a log for each problem."""
    found = {log["problem"]: log["found"] for log in logs}
    cores = {log["problem"]: log["environment"]["cores"] for log in logs}
    parts = ["### Bytes", _sent(found), "### Memory", _kept(found), "### Seconds", _beside(found, cores), _wire(found)]
    parts += ["### Many ranks, by the model alone", _many(found)]
    parts += [f"`{command}`" for command in dict.fromkeys(log["command"] for log in logs)]
    return "\n\n".join([*parts, *dict.fromkeys(one_line(log["environment"]) for log in logs)])


def _sent(found: Mapping[str, Found]) -> str:
    head = ["", "gradient, MB", "K-BFGS, kB", "formula, kB", "messages", "KFAC, MB", "formula, MB"]
    rows = [[*head, "K-BFGS ÷ gradient at T = 20"]]
    for name, of_ranks in found.items():
        alone, members = of_ranks["1"], of_ranks["2"]["members"]
        ours, kfac = members["K-BFGS"]["due"], members["KFAC"]["due"]
        row = [name, f"{alone['gradient'] / 1e6:.2f}", f"{ours['bytes'] / 1e3:.1f}", f"{alone['vectors'] / 1e3:.1f}"]
        row += [str(ours["messages"]), f"{kfac['bytes'] / 1e6:.1f}", f"{alone['factors'] / 1e6:.1f}"]
        rows.append([*row, f"{ours['bytes'] / 20 / alone['gradient']:.2%}"])
    return markdown(rows)


def _kept(found: Mapping[str, Found]) -> str:
    rows = [["", "state, MB", *(f"each of {r}" for r in SEVERAL), *_PLANNED, "inputs of a share, MB", "of a minibatch"]]
    for name, of_ranks in found.items():
        alone, inputs = of_ranks["1"], of_ranks["2"]["inputs"] / 1e6
        sizes = [_megabytes(of_ranks.get(str(ranks), {}).get("kept", [])) for ranks in (1, *SEVERAL)]
        shares = [f"{share:.3f}" for share in alone["shares"].values()]
        whole = inputs / alone["share"] * alone["minibatch"]
        waiting = [f"{inputs:.1f}, {alone['share']} data", f"{whole:.0f}, {alone['minibatch']} data"]
        rows.append([name, *sizes, *shares, *waiting])
    return markdown(rows)


_PLANNED = ("plan: fullest of 2", "of 4", "of 6")


def _megabytes(kept: Sequence[int]) -> str:
    return ", ".join(f"{size / 1e6:.2f}" for size in kept) or "–"


def _beside(found: Mapping[str, Found], cores: Mapping[str, int]) -> str:
    rows = [["", "1", *(f"{r}: {what}" for r in SEVERAL for what in ("predicted", "measured", "error"))]]
    for name, of_ranks in found.items():
        for member in OF:
            row = [f"{name}, {TITLES[member]}", f"{measured(of_ranks, member, 1):.3f}"]
            for ranks in SEVERAL:
                row += _compared(of_ranks, member, ranks, cores[name])
            rows.append(row)
    return markdown(rows)


def _compared(found: Found, member: str, ranks: int, cores: int) -> list[str]:
    if str(ranks) not in found:
        return ["–"] * 3
    wire, took = found[str(ranks)], measured(found, member, ranks)
    guess = predicted(found, member, wire["message"], wire["byte"], max(1, ranks / cores))
    return [f"{guess:.3f}", f"{took:.3f}", f"{guess / took - 1:+.0%}"]


def _wire(found: Mapping[str, Found]) -> str:
    def best(ranks: int) -> str:
        of_ranks = [of_problem[str(ranks)] for of_problem in found.values() if str(ranks) in of_problem]
        message, byte = (min(one[what] for one in of_ranks) for what in ("message", "byte"))
        return f"{1e3 * message:.2f} ms and {1e-6 / byte:.0f} MB/s in {ranks} processes"

    some = [ranks for ranks in SEVERAL if any(str(ranks) in of_ranks for of_ranks in found.values())]
    return f"An all-reduce takes {', and '.join(map(best, some))}, at best, on this machine."


def _many(found: Mapping[str, Found]) -> str:
    rows = [["", *(f"{ranks} ranks" for ranks in MANY), f"÷ SGD-m's, {MANY[-1]} ranks"]]
    for name, of_ranks in found.items():
        wires = [of_many(of_ranks["2"], ranks) for ranks in MANY]
        base = predicted(of_ranks, "SGD-m", *wires[-1])
        for member in OF:
            times = [predicted(of_ranks, member, *wire) for wire in wires]
            rows.append([f"{name}, {TITLES[member]}", *(f"{t:.3f}" for t in times), f"{times[-1] / base:.2f}"])
    return markdown(rows)
