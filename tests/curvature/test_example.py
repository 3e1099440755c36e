"""The example runs, and the documentation shows what it printed."""

import re
from pathlib import Path

import pytest

from examples import hessian_ladder

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "part", ["ladder", *(pytest.param(name, marks=pytest.mark.slow) for name in ("track", "resnet32"))]
)
def test_example_runs(part: str, tmp_path: Path) -> None:
    docs = tmp_path / "page.md"
    docs.write_text(f"before <!-- {part} --> old <!-- end of {part} --> after")
    hessian_ladder.main(["--quick", "--only", part, "--out", str(tmp_path / "out"), "--docs", str(docs)])
    text = docs.read_text()
    assert text.startswith("before") and text.endswith("after") and "old" not in text and "| run" in text
    assert list((tmp_path / "out").glob("*.png"))
    if part == "ladder":
        assert "BackPACK KFLR" in text and "does not run here" in text


def test_marks_are_needed(tmp_path: Path) -> None:
    docs = tmp_path / "page.md"
    docs.write_text("nothing")
    with pytest.raises(ValueError, match="has no marks <!-- ladder -->"):
        hessian_ladder.put_between_marks(docs, "ladder", "text")


@pytest.mark.parametrize("part", hessian_ladder.PARTS)
def test_documentation_shows_what_was_printed(part: str) -> None:
    shown = re.search(rf"<!-- {part} -->(.*?)<!-- end of {part} -->", (DOCS / "curvature.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1].strip() == (DOCS / "curvature" / f"{part}.md").read_text().strip()
