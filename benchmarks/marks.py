"""Parts of a page that programs write, between marks."""

from pathlib import Path


def put_between_marks(page: Path, part: str, text: str) -> None:
    """Replace what stands between ``<!-- part -->`` and ``<!-- end of part -->``."""
    begin, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    before, found, rest = page.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{page} has no marks {begin} … {end}.")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
