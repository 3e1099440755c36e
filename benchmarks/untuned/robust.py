"""How much is lost where a default is changed: ``python -m benchmarks.untuned.robust``.

Each optimizer trains at a third, once and three times its own rate, with each of four ε and with its own. With
``--ends`` it does so at the four ends of both grids and at its own values alone. At its own values it trains once more
with curvature every 20 steps, from the first step on. Problems, minibatches and losses are those of
:mod:`benchmarks.untuned.command`, at one length; ∞ is a run that diverged or broke off.

The first table says how many runs failed. The others have the losses of an optimizer, and then the loss of its own
values in multiples of the best one: the best at its own rate, and at any.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import options
from benchmarks.report import markdown
from benchmarks.untuned import grids
from benchmarks.untuned.grids import Cell
from benchmarks.untuned.lists import ENTRIES, PROBLEMS, SETS
from benchmarks.untuned.report import cost, failures
from kfqn_ext.optim.groups.hyperparameters import UPDATE_FREQS

_RATES, _DAMPINGS, _LATE = (1 / 3, 1.0, 3.0), (0.03, 0.1, 0.3, 1.0), 20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = grids.parser(__doc__, "untuned-robust", grids.UNTUNED)
    choice = list(SETS["choice"])
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=choice, metavar="NAME", help="which ones")
    parser.add_argument("--part", default="robust", help="of the page")
    parser.add_argument("--ends", action="store_true", help="own values, and the ends of both grids, alone")
    args = parser.parse_args(arguments)
    defaults = {name: ENTRIES[name].defaults() for name in args.optimizers}
    cells = [
        {"problem": problem, "optimizer": name, **variant}
        for name, own in defaults.items()
        for variant in variants(own, args.ends)
        for problem in args.problems
    ]
    results = {
        **grids.run(args, "untuned.robust", cells),
        "own": {name: {key: own[key] for key in ("lr", "damping")} for name, own in defaults.items()},
    }
    options.write(args.json, results)
    options.show(args.docs, f"untuned {args.part}", render(results))


def variants(own: Mapping[str, Any], ends: bool = False) -> list[dict[str, Any]]:
    """Settings around an optimizer's own: all rates with all ε, then its own values with T = 20 throughout.

    Where only ``ends`` are wanted, the smallest and largest rates with the smallest and largest ε, and its own values.
    """
    pairs = [(rate, damping) for rate in _RATES for damping in sorted({*_DAMPINGS, own["damping"]})]
    if ends:
        corners = [(rate, damping) for rate in _RATES[::2] for damping in _DAMPINGS[::3]]
        pairs = [pair for pair in pairs if pair in corners or pair == (1.0, own["damping"])]
    grid = [_variant(own, rate, damping) for rate, damping in pairs]
    late = _variant(own, 1.0, own["damping"])
    frequency = next(name for name in UPDATE_FREQS if name in own)
    return [*grid, {**late, "late": True, "setting": {**late["setting"], frequency: _LATE}}]


def _variant(own: Mapping[str, Any], rate: float, damping: float) -> dict[str, Any]:
    setting = {"lr": grids.rounded(rate * own["lr"]), "damping": damping}
    return {"rate": rate, "damping": damping, "late": False, "setting": setting}


def render(results: dict[str, Any]) -> str:
    """All tables of a log."""
    blocks = [f"{results['steps']} steps, seeds {', '.join(map(str, results['seeds']))}.", _failed(results)]
    for name, title in results["optimizers"].items():
        own = results["own"][name]
        blocks += [f"### {title}: rate {own['lr']:g}, ε {own['damping']:g}", _table(results, name, own["damping"])]
    return "\n\n".join([*blocks, *failures(results), cost(results), f"`{results['command']}`"])


def _failed(results: dict[str, Any]) -> str:
    """How many runs failed, of how many, by optimizer and rate."""
    columns: dict[str, dict[str, Any]] = {
        **{f"rate × {rate:.2g}": {"rate": rate, "late": False} for rate in _RATES},
        f"T = {_LATE}": {"late": True},
    }
    rows = [["runs that failed", *columns]]
    for name, title in results["optimizers"].items():
        found = [grids.of(results["cells"], optimizer=name, **labels) for labels in columns.values()]
        rows.append([title, *map(_count, found)])
    return markdown(rows)


def _count(cells: Sequence[Cell]) -> str:
    losses = [loss for cell in cells for loss in cell["losses"]]
    return f"{losses.count(None)} of {len(losses)}"


def _table(results: dict[str, Any], name: str, own: float) -> str:
    """Losses of an optimizer by rate and ε, and what its own values lose."""
    columns = [grids.of(results["cells"], optimizer=name, problem=problem) for problem in results["problems"]]
    labels = dict.fromkeys((cell["rate"], cell["damping"], cell["late"]) for column in columns for cell in column)
    rows = [["", *results["problems"]]]
    for rate, damping, late in labels:
        row = [grids.of(column, rate=rate, damping=damping, late=late) for column in columns]
        rows.append([_label(rate, damping, late), *map(grids.text, row)])
    for title, among in (("own ÷ best ε at this rate", {"rate": 1.0}), ("own ÷ best", {})):
        lost = [_lost(column, own, among) for column in columns]
        rows += [[title, *lost]] if any(lost) else []
    return markdown(rows)


def _label(rate: float, damping: float, late: bool) -> str:
    return f"rate × {rate:.2g}, ε {damping:g}" + (f", T = {_LATE} from the first step" if late else "")


def _lost(column: Sequence[Cell], own: float, among: Mapping[str, Any]) -> str:
    """The loss of an optimizer's own values in multiples of the best of some cells; nothing where it is alone."""
    others = grids.of(column, late=False, **among)
    return grids.ratio(grids.of(column, rate=1.0, damping=own, late=False), others) if len(others) > 1 else ""


if __name__ == "__main__":
    main()
