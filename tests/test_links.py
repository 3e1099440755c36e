"""Links of the README and the documentation: files exist, anchors are headings, and every page is on the site."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "examples", "results", "tests")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
PAGES = [page for page in PAGES if not {"_build", "auto_gallery"} & set(page.parts)]
LINK = re.compile(r"\[[^][]*\]\(([^()\s]+(?:\([^()]*\))?[^()\s]*)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
MADE = ("docs/auto_gallery/",)  # pages that are there once the site is built


def words(text: str) -> str:
    """A page without its code, whose brackets are none of its own."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "code", text)


def anchors(text: str) -> set[str]:
    """Those of the headings, as GitHub and MyST make them."""
    found: set[str] = set()
    for heading in HEADING.findall(re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)):
        plain = re.sub(r"\[([^][]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        same = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other) is not None for other in found)
        found.add(f"{slug}-{same}" if same else slug)
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def broken(page: Path, root: Path = ROOT) -> list[str]:
    """Links of a page that lead nowhere."""
    wrong = []
    for target in LINK.findall(words(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        is_made = path.is_relative_to(root) and str(path.relative_to(root)).startswith(MADE)
        exists = any(each.exists() for each in (path, *(path.with_name(f"{path.name}.{end}") for end in ("md", "rst"))))
        leads = not anchor or path.suffix != ".md" or (exists and anchor in anchors(path.read_text()))
        if not (is_made or exists and leads):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# A `head`\n## A head\n```\n# no head\n```\n")
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#a-head) [c](#here) [d](https://x.org) `[e](f)` [g](other.md#a-head-1)"
    )
    assert broken(page, tmp_path) == []
    page.write_text("[a](others.md) [b](other.md#no-head) [c](#there) ![d](picture.png)")
    assert broken(page, tmp_path) == ["others.md", "other.md#no-head", "#there", "picture.png"]


def test_the_index_shows_every_page_once() -> None:
    """A page that is missing there would be an error of ``make docs``."""
    index = (ROOT / "docs/index.md").read_text()
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.DOTALL | re.MULTILINE)
    shown = [
        re.sub(r".*<(.+)>", r"\1", line) for tree in trees for line in tree.splitlines() if line[:1] not in ("", ":")
    ]
    pages = {
        str(page.relative_to(ROOT / "docs").with_suffix("")) for page in PAGES if page.is_relative_to(ROOT / "docs")
    }
    fragments = {page for page in pages if page.startswith("curvature/")}  # tables, for who looks for numbers
    assert sorted(shown) == sorted({*pages - fragments - {"index"}, "api/index", "auto_gallery/index"})
