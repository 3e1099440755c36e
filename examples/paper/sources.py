"""Where finished runs are: directories of ``table``, logs of ``run``, files of ``gather``."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workloads import records

RESULTS = "results.jsonl"
TABLE_FILE = "table.json"

Line = dict[str, Any]


def to_line(log: list[Line]) -> Line:
    """One line that holds a finished run's whole log."""
    header, *epochs, end = log
    return {"kind": "result", "header": header, "epochs": epochs, "end": end}


def to_log(line: Line) -> list[Line]:
    """The log that a line was made of."""
    return [line["header"], *line["epochs"], line["end"]]


def logs(file: Path) -> list[list[Line]]:
    """The logs in a file: that of one run, finished or not, or those of all runs that were gathered."""
    lines = records.read(file)
    return [to_log(line) for line in lines] if kind_of(file) == "result" else [lines]


def finished(paths: Iterable[Path]) -> list[Line]:
    """One line a finished run, which says its table if it is of one; the last line where several are of one run.

    Raises:
        ValueError: If a file has no runs.
    """
    lines = [_of_table(line, table_in(path)) for path in paths for line in _finished(path)]
    return list({line["header"]["key"]: line for line in lines}.values())


def finished_keys(directory: Path) -> set[str]:
    """Keys of the cells that have a result."""
    return {line["header"]["key"] for line in records.read(directory / RESULTS)}


def _finished(path: Path) -> list[Line]:
    file = path / RESULTS if path.is_dir() else path
    kind = kind_of(file)
    if kind is None and not (file.exists() and file.stat().st_size):
        return []  # it has only just begun
    if kind not in ("header", "result"):
        said = "no line of a log" if kind is None else f"lines of the kind {kind!r}"
        raise ValueError(
            f"{file} has {said}, not the log of a run. Name logs of `run`, directories of `table`, files of `gather`."
        )
    lines = records.read(file)
    if kind == "header":
        return [to_line(lines)] if lines[-1]["kind"] == "end" else []
    return lines


def _of_table(line: Line, table: str | None) -> Line:
    return line if table is None else {"kind": "result", "table": table, **line}


def describe(directory: Path, table: str) -> None:
    """Write down which table a directory holds.

    Raises:
        SystemExit: If it holds another.
    """
    holds = table_in(directory)
    if holds is None:
        records.write_atomically(directory / TABLE_FILE, json.dumps({"table": table}).encode())
    elif holds != table:
        raise SystemExit(
            f"{directory} holds results of {holds}, and a directory has one table: name another for {table}."
        )


def table_in(path: Path) -> str | None:
    """The table that a directory of ``table``, or a file gathered from it, holds; None for anything else."""
    if not path.is_dir():
        return first_record(path).get("table")
    file = path / TABLE_FILE
    return json.loads(file.read_text())["table"] if file.exists() else None


def kind_of(file: Path) -> str | None:
    """What the first whole line of a file says that it is; None where it says nothing, or there is none."""
    return first_record(file).get("kind")


def first_record(file: Path) -> Line:
    """The first whole line of a file; nothing where that is no record, or there is none."""
    for line in file.read_bytes().splitlines() if file.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:  # cut short, or no text at all
            continue
        return record if isinstance(record, dict) else {}
    return {}
