"""The site: ``make docs`` builds it from the pages here, the docstrings and the gallery, without a network."""

import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "inventories")]  # the checkout itself, installed or not

from make import OTHER_NAMES  # noqa: E402

import kfqn_ext  # noqa: E402

project = "kfqn-ext"
author = "the kfqn-ext authors"
copyright = author  # noqa: A001
release = kfqn_ext.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "myst_parser",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = [
    "_build",
    "curvature",
    "gallery",
    "inventories",
    "**/sg_execution_times.rst",
    "sg_execution_times.rst",
]
nitpicky = True
nitpick_ignore_regex = [("py:(class|obj)", r"kfqn_ext\..*\._?[A-Z]")]  # type variables
myst_heading_anchors = 6

html_theme = "furo"
html_title = "kfqn-ext"
html_static_path, html_css_files = ["_static"], ["site.css"]
python_maximum_signature_line_length = 90  # longer ones have a line for each argument

autodoc_member_order = "bysource"
autoclass_content = "both"
napoleon_use_ivar = True

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"/\d\d_",  # all of them run
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "image_srcset": ["2x"],
    "min_reported_time": 20,  # seconds, more than any should take
    "show_signature": False,
}

PROJECTS = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "backpack": "https://docs.backpack.pt/en/master/",
}
if not tags.has("no-inventories"):  # noqa: F821  # sphinx defines it
    intersphinx_mapping = {name: (url, str(DOCS / f"inventories/{name}.inv")) for name, url in PROJECTS.items()}


# ------------------------------------------------------------------ docstrings

# Code, roles, examples, literal blocks and names of arguments stay; a sign alone is itself and no markup.
KEPT = r"``.+?``|`[^`]+`_?|^ *(?:>>>|\.\.\. ).*$|::\n\n(?: +.*\n|\n)+|^ *\*{1,2}\w+:"
SIGN = re.compile(rf"{KEPT}|[*|]|(?<=\w)_(?!\w)", re.MULTILINE)


def plain_signs(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Let docstrings write ``[*B, d]``, ``|T|`` and ``flush_`` as they are."""
    text = SIGN.sub(lambda found: found[0] if len(found[0]) > 1 else f"\\{found[0]}", "\n".join(lines))
    lines[:] = text.split("\n")


def names_of_functions(app: Any, what: str, name: str, obj: Any, options: Any, arguments: str, returns: str) -> Any:
    """Show a default that is a function by its name, and not by where it lies in memory."""
    return arguments and re.sub(r"<function (\w+) at \w+>", r"\1", arguments), returns


# ------------------------------------------------------------------ links


def public_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Lead a name, whole or short, to the page of the object: few are documented where they are defined."""
    target = node.get("reftarget", "")
    node["reftarget"] = OTHER_NAMES.get(target, target)  # intersphinx comes next
    if node.get("refdomain") != "py":
        return None
    domain, last = env.get_domain("py"), f".{target.rpartition('.')[2]}"
    found = [name for name in domain.objects if name.endswith(last)]
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, contnode)


LINK = re.compile(r"\[([^][]+)\]\((\.\./[^)#\s]+)[^)]*\)")


def beyond_the_site(app: Any, docname: str, source: list[str]) -> None:
    """Name the files of the checkout that pages link to: they are not on the site."""
    folder = (DOCS / docname).parent

    def name(found: re.Match[str]) -> str:
        path = (folder / found[2]).resolve()
        if path.is_relative_to(DOCS):
            return found[0]
        inside = path.relative_to(DOCS.parent)
        return f"`{inside}`" if found[1].strip("`/") == str(inside) else f"{found[1]} (`{inside}`)"

    source[0] = LINK.sub(name, source[0])


def setup(app: Any) -> None:
    """Register what is above; before napoleon and intersphinx."""
    app.connect("source-read", beyond_the_site)
    app.connect("autodoc-process-docstring", plain_signs, priority=400)
    app.connect("autodoc-process-signature", names_of_functions)
    app.connect("missing-reference", public_name, priority=400)
