"""A page in Markdown, made of results alone: no number on it was typed by hand."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from examples.paper import figures, paper_values, summary
from examples.paper.results import Result, environments, load, time_column
from examples.paper.sources import RESULTS, TABLE_FILE, table_in
from examples.paper.tables import TABLES
from workloads import environment
from workloads.problems import PROBLEMS

LEVELS = {"mnist": (60.0, 56.0, 54.0, 52.5), "curves-generated": (100.0, 80.0, 70.0), "vgg8-mnist": (97.0, 98.0, 99.0)}


@dataclass(frozen=True)
class Section:
    """One table, or logs of ``run``.

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

    @property
    def problems(self) -> list[str]:
        return list(dict.fromkeys(r.cell.problem for r in self.results))

    def figure(self, problem: str) -> str:
        """Name of a problem's figure, without a suffix."""
        return f"{self.name}-{problem}"

    @property
    def figures(self) -> set[str]:
        """Names of all its figures."""
        return {self.figure(problem) for problem in self.problems}

    def beside(self, taken: set[str]) -> "Section":
        """The same section, renamed where one of its figures would replace one of these."""
        names = itertools.chain([self.name], (f"{self.name}-{number}" for number in itertools.count(2)))
        sections = (replace(self, name=name) for name in names)
        return next(section for section in sections if not section.figures & taken)


def section_of_table(source: Path) -> Section:
    """The section of a directory that ``table`` wrote, or of a file that was gathered from one."""
    table_name = table_in(source)
    name = source.stem if source.is_file() else source.resolve().name
    if table_name is None and not (source / RESULTS).exists():
        raise ValueError(f"{source} is no directory of `table`: it has neither {TABLE_FILE} nor {RESULTS}.")
    table = TABLES.get(table_name or "")
    title, published = (name, None) if table is None else (f"{table.title} (`{table_name}`)", table.published)
    return Section(name, title, load([source]), published)


def section_of_runs(files: Sequence[Path]) -> Section:
    """One section for logs of ``run``, gathered or not."""
    published = {**paper_values.TABLE_7, **paper_values.TABLE_1}
    return Section("runs", "Single runs", load(files), published)


def render(section: Section, page: Path | None) -> str:
    """The section in Markdown; draws its figures where there is a page to show them."""
    blocks = [f"## {section.title}"]
    for problem in section.problems:
        blocks += _problem(section, problem, page)
    if not section.results:
        blocks.append("No finished run yet.")
    else:
        blocks.append(provenance(section.results))
    return "\n\n".join(blocks)


def _problem(section: Section, problem: str, page: Path | None) -> list[str]:
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
    if page is not None:
        path = figures.draw(results, problem, _figure_directory(page), section.figure(problem))
        title = f"{PROBLEMS[problem].title}: loss and error by epoch and second"
        blocks += [] if path is None else [f"![{title}]({path.relative_to(page.parent).as_posix()})"]
    return [block for block in blocks if block]


def _figure_directory(page: Path) -> Path:
    return page.parent / "figures" if page.stem == "README" else page.with_suffix("")


def provenance(results: Sequence[Result]) -> str:
    """Machine, versions, seeds and commands."""
    headers = [r.header for r in results]
    lines = [f"* command: `{command}`" for command in _unique(h["command"] for h in headers)]
    lines += [f"* seeds: {', '.join(_unique(str(r.cell.seed) for r in results))}"]
    for text in _unique(json.dumps(e, sort_keys=True) for h in headers for e in environments(h)):
        lines.append(f"* {environment.one_line(json.loads(text))}")
    clocks = {"cpu_seconds": "the process's own, of one thread", "seconds": "the wall clock's"}
    lines.append(f"* seconds of training are {' or '.join(_unique(clocks[time_column(h)] for h in headers))}")
    if any(h.get("jobs", 1) > 1 for h in headers):
        lines.append("* several runs at a time shared this machine: compare their seconds with care")
    return "\n".join(lines)


def markdown(frame: pd.DataFrame) -> str:
    """A data frame of text as a Markdown table."""
    if frame.empty:
        return "No method finished without diverging."
    rows = [list(frame.columns), ["---"] * len(frame.columns), *frame.fillna("").astype(str).values.tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _unique(items) -> list[str]:
    return list(dict.fromkeys(items))
