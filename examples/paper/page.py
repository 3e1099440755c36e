"""A page in Markdown, made of results alone: no number on it was typed by hand."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from examples.paper import figures, paper_values, records, summary
from examples.paper.problems import PROBLEMS
from examples.paper.results import Result, environments, load, time_column
from examples.paper.tables import TABLES

TABLE_FILE = "table.json"
LEVELS = {"mnist": (60.0, 56.0, 54.0, 52.5), "curves-generated": (100.0, 80.0, 70.0), "vgg8-mnist": (97.0, 98.0, 99.0)}


@dataclass(frozen=True)
class Section:
    """One directory of ``table``, or logs of ``run``.

    Attributes:
        name: Used for file names.
        title: Its heading.
        results: What it shows.
        published: The paper's results beside them.
    """

    name: str
    title: str
    results: list[Result]
    published: summary.Published | None


def describe(directory: Path, table: str) -> None:
    """Write down which table a directory holds."""
    records.write_atomically(directory / TABLE_FILE, json.dumps({"table": table}).encode())


def section_of_table(directory: Path) -> Section:
    """The section of a directory that ``table`` wrote."""
    file = directory / TABLE_FILE
    name = json.loads(file.read_text())["table"] if file.exists() else None
    table = TABLES.get(name)
    title, published = (directory.name, None) if table is None else (f"{table.title} (`{name}`)", table.published)
    return Section(directory.name, title, load([directory]), published)


def section_of_runs(logs: Sequence[Path]) -> Section:
    """One section for logs of ``run``."""
    published = {**paper_values.TABLE_7, **paper_values.TABLE_1}
    return Section("runs", "Single runs", load(logs), published)


def render(section: Section, figure_directory: Path, relative_to: Path) -> str:
    """The section in Markdown; draws its figures."""
    blocks = [f"## {section.title}"]
    for problem in dict.fromkeys(r.cell.problem for r in section.results):
        blocks += _problem(section, problem, figure_directory, relative_to)
    if not section.results:
        blocks.append("No finished run yet.")
    else:
        blocks.append(provenance(section.results))
    return "\n\n".join(blocks)


def _problem(section: Section, problem: str, figure_directory: Path, relative_to: Path) -> list[str]:
    results = [r for r in section.results if r.cell.problem == problem]
    blocks = [f"### {PROBLEMS[problem].title}", markdown(summary.main_table(results, problem, section.published))]
    blocks += ["\n".join(f"* {text}" for text in summary.remarks(results, problem))]
    by_epoch = summary.by_epoch(results, problem)
    metric = "training loss" if results[0].metric == "train_loss" else "accuracy"
    if len(by_epoch):
        blocks += [f"{metric.capitalize()} after so many epochs:", markdown(by_epoch)]
    if problem in LEVELS:
        reach = summary.to_reach(results, problem, LEVELS[problem])
        blocks += [f"Epochs (and seconds of training) until the mean {metric} has reached", markdown(reach)]
    path = figures.draw(results, problem, figure_directory, f"{section.name}-{problem}")
    if path is not None:
        blocks.append(
            f"![{PROBLEMS[problem].title}: loss and error by epoch and second]({path.relative_to(relative_to)})"
        )
    return [block for block in blocks if block]


def provenance(results: Sequence[Result]) -> str:
    """Machine, versions, seeds and commands."""
    headers = [r.header for r in results]
    lines = [f"* command: `{command}`" for command in _unique(h["command"] for h in headers)]
    lines += [f"* seeds: {', '.join(_unique(str(r.cell.seed) for r in results))}"]
    for environment in _unique(json.dumps(e, sort_keys=True) for h in headers for e in environments(h)):
        lines.append(f"* {machine(json.loads(environment))}")
    clocks = {"cpu_seconds": "the process's own, of one thread", "seconds": "the wall clock's"}
    lines.append(f"* seconds of training are {' or '.join(_unique(clocks[time_column(h)] for h in headers))}")
    if any(h.get("jobs", 1) > 1 for h in headers):
        lines.append("* several runs at a time shared this machine: compare their seconds with care")
    return "\n".join(lines)


def machine(environment: dict) -> str:
    """One line about a machine."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['processor']}, cores: {environment['cores']}, device: {environment['device']}, "
        f"threads: {environment['threads']}; {environment['system']}, Python {environment['python']}, {versions}"
    )


def markdown(frame: pd.DataFrame) -> str:
    """A data frame of text as a Markdown table."""
    if frame.empty:
        return "No method finished without diverging."
    rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.fillna("").astype(str).values.tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _unique(items) -> list[str]:
    return list(dict.fromkeys(items))
