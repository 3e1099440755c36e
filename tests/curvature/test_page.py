"""The first table of docs/curvature.md has the numbers of the block that the example writes below it."""

from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/curvature.md").read_text()


def table(text: str) -> dict[str, dict[str, str]]:
    """Cells of the first table in a text, by row and column."""
    lines = text[text.index("| rung |") :].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")])
    return {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in rows}


def test_the_first_table_is_a_part_of_the_block() -> None:
    block = PAGE.partition("<!-- ladder -->")[2].partition("<!-- end of ladder -->")[0]
    errors, shares = table(block), table(block[block.index("Share of Newton's decrease") :])
    shown = table(PAGE.partition("<!-- ladder -->")[0])
    assert len(shown) == 6
    for rung, cells in shown.items():
        layers = ("mlp 3", "cnn 2", "cnn 5")
        assert list(cells.values()) == [errors[rung][layer] for layer in layers] + [
            shares[rung][layer] for layer in layers
        ]
