"""Files of JSON lines that survive being killed at any moment."""

import json
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Refused(ValueError):
    """What was asked for can't be done; the message says why, and what to do instead."""


def append(path: Path, record: Record) -> None:
    """Append one line, in one write, and wait until it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(record) + "\n").encode()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if _is_torn(file):  # an earlier append was cut short: keep it from swallowing this line
            line = b"\n" + line
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


def replace(path: Path, records: Iterable[Record]) -> None:
    """Write all lines; the file is the old one or the new one at every moment."""
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in records).encode())


def write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read(path: Path) -> list[Record]:
    """All whole lines; a line that was cut short is no line. An absent file has none.

    Raises:
        Refused: If several runs have written to one log.
    """
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    if any(_kind(record) == "header" for record in records) and not _is_of_one_run(records):
        raise Refused(
            f"{path} has lines of several runs, where a log has a header, epochs in their order and an end: runs wrote "
            "to it at the same time, and which line is whose can't be told. Run each again, with an --out of its own."
        )
    return records


def ended(log: list[Record]) -> bool:
    """Whether a log is that of a run to its end."""
    return bool(log) and log[-1]["kind"] == "end"


def _kind(line: Any) -> str | None:
    """A file that is none of ours may have other JSON."""
    return line.get("kind") if isinstance(line, dict) else None


def _is_of_one_run(log: list[Record]) -> bool:
    kinds = [_kind(record) for record in (log[:-1] if _kind(log[-1]) == "end" else log)]
    iterations = [record["iteration"] for record in log if _kind(record) == "epoch"]
    in_order = all(before < after for before, after in pairwise(iterations))
    return kinds == ["header", *["epoch"] * len(iterations)] and in_order


def _is_torn(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
