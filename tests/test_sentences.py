"""Long sentences of the documentation, counted: ``python -m tests.test_sentences`` prints them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS = 25
LONG_SENTENCES = 0  # at most: may only fall
END = re.compile(r"""(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!et al\.)[*_)"”]*\s+""")


def sentences(page: str) -> list[str]:
    """What a page says in words: not its code, tables, headings, pictures, and what programs wrote."""
    page = re.sub(r"^( *)```.*?^\1```", "\n", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!-- (.+?) -->.*?<!-- end of \1 -->", "", page, flags=re.DOTALL)
    page = re.sub(r"^ *(\|.*|#.*|!\[.*)$", "", page, flags=re.MULTILINE)
    page = re.sub(r"`[^`]*`", "code", page)  # one word, whose full stops end nothing
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    paragraphs = re.split(r"\n\s*\n|\n(?= *(?:[*-]|\d+\.) )", page)
    return [s for p in paragraphs for s in END.split(" ".join(p.split())) if s]


def length(sentence: str) -> int:
    """Its words; a sign alone is none."""
    return sum(any(c.isalnum() for c in word) for word in sentence.split())


def long_sentences(page: str) -> list[str]:
    return [s for s in sentences(page) if length(s) > MOST_WORDS]


def test_long_sentences_become_fewer() -> None:
    found = {path.name: long_sentences(path.read_text()) for path in PAGES}
    told = "\n".join(f"{name}: {s}" for name, some in found.items() for s in some)
    assert sum(map(len, found.values())) <= LONG_SENTENCES, f"Cut the new one into two:\n{told}"


LONG = "word " * 25 + "last."


@pytest.mark.parametrize(
    ("page", "count"),
    [
        (LONG, 1),
        (f"* {LONG}\n* {LONG}", 2),
        (LONG.replace("word word", "word. Word"), 0),
        (LONG.replace("word word", "0.5 e.g."), 1),
        (LONG.replace("word word", "`a. B` ="), 0),
        (f"```\n{LONG}\n```", 0),
        (f"| {LONG} |\n# {LONG}", 0),
        (LONG.replace("word word", "word\n\nword"), 0),
    ],
)
def test_what_is_a_long_sentence(page: str, count: int) -> None:
    assert len(long_sentences(page)) == count


if __name__ == "__main__":
    for path in PAGES:
        some = long_sentences(path.read_text())
        print(f"\n{path.name}: {len(some)}", *(f"{length(s)}: {s}" for s in some), sep="\n")
