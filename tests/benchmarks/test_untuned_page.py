"""What docs/untuned.md says is what its logs in results/ say."""

import json
from pathlib import Path

import pytest

from benchmarks.untuned import autoencoder_report, report, robust, widths

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/untuned.md").read_text()
PARTS = {
    "choice": report.render,
    "held-out": report.render,
    "robust": robust.render,
    "widths": widths.render,
    "autoencoder": autoencoder_report.render,
}
LOGS = {part: ROOT / "results" / f"untuned-{part}.jsonl" for part in PARTS}


def block(part: str) -> str:
    """What stands between the marks of a part."""
    _, begin, rest = PAGE.partition(f"<!-- untuned {part} -->")
    text, end, _ = rest.partition(f"<!-- end of untuned {part} -->")
    assert begin and end
    return text.strip()


@pytest.mark.parametrize("part", PARTS)
def test_tables_are_those_of_the_logs(part: str) -> None:
    assert block(part) == PARTS[part](json.loads(LOGS[part].read_text()))
