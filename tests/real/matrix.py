"""Writes the support matrix: ``python -m tests.real.matrix``."""

from pathlib import Path

from tests.real import models
from tests.real.support import ROWS

FILE = Path(__file__).parents[2] / "docs" / "support.md"
HEADER = """# What works, and what says that it does not

Generated from the list that the tests run (`python -m tests.real.matrix`); each row is a test of its own,
`tests/real/test_support.py::test_row`.

* **works**: measured and preconditioned, and equal to a reference.
* **momentum**: trains; the parameters that no block covers move by AdamW, or in the paper's form by their momentum, as
  `repr(optimizer)` says.
* **refused**: an error or a warning says what was found, why it can't work, and what to write instead.

Data are along dimension 0 of a layer's input. With `batch_first=False` that is time: the layers train, with the roles
of data and locations exchanged; prefer `batch_first=True`.

Rows on processes are cases of `tests/distributed`, which run in two processes, and slowly in four. `support.py` names
the cases of each row.
"""
FAMILIES = """
## torchvision's classification models

Layers with a Kronecker block by the optimizer's table, of all Linear and Conv layers. Swin's attention multiplies with
the weights of its `qkv` and `proj` layers without calling them. The optimizer notices in the first step, names them in
a warning, and they move without a block. ViT's `in_proj_weight` and `out_proj` belong to MultiheadAttention.

| family | model | layers | parameters in them |
|---|---|---|---|
"""


def text() -> str:
    lines = [HEADER]
    for area in dict.fromkeys(row.area for row in ROWS):
        lines += [f"\n## {area.capitalize()}\n\n| what | verdict | why, or how |\n|---|---|---|\n"]
        for row in ROWS:
            if row.area == area:
                why = row.why.replace("|", "\\|")
                lines.append(f"| {row.name} | {row.verdict} | {why} |\n")
    lines.append(FAMILIES)
    for name, build in models.FAMILIES.items():
        blocks, layers, inside, total = models.covered(name)
        lines.append(f"| {name} | {build.__name__} | {blocks} of {layers} | {100 * inside / total:.1f} % |\n")
    return "".join(lines)


if __name__ == "__main__":
    FILE.write_text(text())
    print(f"{FILE}: {len(ROWS)} rows")
