"""Write the inventories of Python, torch and BackPACK from the names that the pages use.

``python docs/inventories/make.py`` reads the pages without inventories, and collects what has no target. Sphinx then
builds the site without a network. The format is Sphinx's first: a line for each name, with its kind and its page.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MISSING = re.compile(r"py:(\w+) reference target not found: ([\w.]+) \[")
PAGES = {
    "python": {
        "collections.abc": "library/collections.abc.html",
        "pathlib": "library/pathlib.html",
    },
    "backpack": {"backpack": "main-api.html"},
    "torch": {
        "torch.Tensor": "tensors.html",
        "torch.device": "tensor_attributes.html",
        "torch.distributed": "distributed.html",
        "torch.dtype": "tensor_attributes.html",
        "torch": "generated/{}.html",
    },
}
"""Where names that begin so are documented; the first that fits counts."""

OTHER_NAMES = {  # that signatures have for what is documented under another
    "Tensor": "torch.Tensor",
    "nn.Module": "torch.nn.Module",
    "torch._C.Generator": "torch.Generator",
    "torch.distributed.distributed_c10d.ProcessGroup": "torch.distributed.ProcessGroup",
    "torch.nn.modules.module.Module": "torch.nn.Module",
}


def names_used() -> list[tuple[str, str]]:
    """Kinds and names that no page of this site documents."""
    with tempfile.TemporaryDirectory() as out:
        options = ["-t", "no-inventories", "-D", "plot_gallery=0", "-q", "-E", "-b", "dummy"]
        command = [sys.executable, "-m", "sphinx", *options, str(HERE.parent), out]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return sorted({(kind, OTHER_NAMES.get(name, name)) for kind, name in MISSING.findall(done.stderr)})


def inventory(project: str, names: list[tuple[str, str]]) -> str:
    """The inventory of one project."""
    lines = ["# Sphinx inventory version 1", f"# Project: {project}", "# Version: stable"]
    for kind, name in names:
        page = next((page for start, page in PAGES[project].items() if f"{name}.".startswith(f"{start}.")), None)
        if page is not None:
            lines.append(f"{name} {kind} {page.format(name)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    used = names_used()
    for project in PAGES:
        (HERE / f"{project}.inv").write_text(inventory(project, used))
