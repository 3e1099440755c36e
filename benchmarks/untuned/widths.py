"""Whether a rate that suits a narrow network suits a wide one: ``python -m benchmarks.untuned.widths``.

An MLP and a CNN train at four widths, with five rates each: from a quarter of an optimizer's own to four times it, and
Adam's those of :mod:`benchmarks.untuned.peers`. Minibatches and losses are those of :mod:`benchmarks.untuned.command`,
at one length; ∞ is a run that diverged or broke off.

The first table of a network has the best rate at each width. The next two have losses in multiples of that at the best
rate: that of the optimizer's own rate, and that of the rate which is best for the narrowest network. The last has all.
"""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import options
from benchmarks.report import markdown
from benchmarks.untuned import grids
from benchmarks.untuned.entry import Entry
from benchmarks.untuned.grids import Cell
from benchmarks.untuned.lists import ENTRIES
from benchmarks.untuned.report import cost, failures
from benchmarks.untuned.wide import NETWORKS, WIDTHS, name_of

# Cells of an optimizer at a width, and those of it for the narrowest network ↦ what a table has of them.
Text = Callable[[Sequence[Cell], Sequence[Cell]], str]
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = grids.parser(__doc__, "untuned-widths", [*grids.UNTUNED, "adam"])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="which ones")
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, help="in multiples of the narrowest")
    args = parser.parse_args(arguments)
    widths = args.widths or (WIDTHS[:2] if args.quick else WIDTHS)
    cells = [
        {"problem": name_of(network, width), "network": network, "width": width, "optimizer": name, **rate}
        for network in args.networks
        for width in widths
        for name in args.optimizers
        for rate in rates(ENTRIES[name])
    ]
    results = {**grids.run(args, "untuned.widths", cells), "networks": args.networks, "widths": widths}
    options.write(args.json, results)
    options.show(args.docs, "untuned widths", render(results))


def rates(entry: Entry) -> list[dict[str, Any]]:
    """An optimizer's own grid of rates where it has one, and five around its own rate where not."""
    own = entry.defaults()["lr"]
    grid = [setting["lr"] for setting in entry.grid] if entry.is_tuned else [factor * own for factor in _FACTORS]
    return [{"setting": {"lr": grids.rounded(rate)}, "is_own": rate == own} for rate in grid]


def render(results: dict[str, Any]) -> str:
    """All tables of a log."""
    blocks = [f"{results['steps']} steps, seeds {', '.join(map(str, results['seeds']))}."]
    for network in results["networks"]:
        cells = grids.of(results["cells"], network=network)
        blocks += [
            f"### {NETWORKS[network]}",
            "Best rate; ◂ is an end of the grid.",
            _table(results, cells, _best),
            "Loss at the optimizer's own rate ÷ at the best.",
            _table(results, cells, _own),
            "Loss at the rate that is best for the narrowest network ÷ at the best.",
            _table(results, cells, _narrow),
            "All losses.",
            _losses(results, cells),
        ]
    return "\n\n".join([*blocks, *failures(results), cost(results), f"`{results['command']}`"])


def _table(results: dict[str, Any], cells: Sequence[Cell], text: Text) -> str:
    """One number for each optimizer and width."""
    rows = [_head(results)]
    for name, title in results["optimizers"].items():
        found = [grids.of(cells, optimizer=name, width=width) for width in results["widths"]]
        rows.append([title, *(text(row, found[0]) for row in found)])
    return markdown(rows)


def _head(results: dict[str, Any]) -> list[str]:
    return ["", *(f"×{width}" for width in results["widths"])]


def _best(cells: Sequence[Cell], narrow: Sequence[Cell]) -> str:
    best = grids.best(cells)
    if best is None:
        return ""
    return f"{_rate(best):g}" + (" ◂" if _rate(best) in (_rate(cells[0]), _rate(cells[-1])) else "")


def _own(cells: Sequence[Cell], narrow: Sequence[Cell]) -> str:
    return grids.ratio(grids.of(cells, is_own=True), cells)


def _narrow(cells: Sequence[Cell], narrow: Sequence[Cell]) -> str:
    best = grids.best(narrow)
    return "" if best is None else grids.ratio(grids.of(cells, setting=best["setting"]), cells)


def _losses(results: dict[str, Any], cells: Sequence[Cell]) -> str:
    rows = [_head(results)]
    for name, title in results["optimizers"].items():
        mine = grids.of(cells, optimizer=name)
        for rate in dict.fromkeys(map(_rate, mine)):
            row = [grids.of(mine, width=width, setting={"lr": rate}) for width in results["widths"]]
            rows.append([f"{title}, {rate:g}", *map(grids.text, row)])
    return markdown(rows)


def _rate(cell: Cell) -> float:
    return cell["setting"]["lr"]


if __name__ == "__main__":
    main()
