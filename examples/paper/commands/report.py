"""``report``: tables, figures and a page from results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markdown import Markdown

from examples.paper import environment
from examples.paper.costs.report import is_costs, render_costs
from examples.paper.page import Section, render, section_of_runs, section_of_table


@dataclass(frozen=True)
class Report:
    """Print the tables of finished runs; with --page, also write them to a page, with figures beside it.

    Example: python -m examples.paper report runs/table-1 runs/table-8 --page results.md
    """

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of `table`, logs of `run`, files of `costs`, in the order of the page's sections."""
    page: Path = Path("results/README.md")
    """The page, in Markdown. Figures, PNG and PDF, go to a directory beside it."""

    def main(self) -> None:
        if not self.paths:
            raise SystemExit("Name at least one directory or file.")
        missing = [str(path) for path in self.paths if not path.exists()]
        if missing:
            raise SystemExit(f"Not there: {', '.join(missing)}")
        directory = self.page.parent / "figures" if self.page.stem == "README" else self.page.with_suffix("")
        sections = [self._render(section, directory) for section in self._sections()]
        head = f"# Results\n\nMade by `{environment.command()}`; every number comes from the logs of the runs."
        text = "\n\n".join([head, *sections]) + "\n"
        self.page.parent.mkdir(parents=True, exist_ok=True)
        self.page.write_text(text)
        Console().print(Markdown(text))
        print(f"Written to {self.page}")

    def _sections(self) -> list[Section | Path]:
        """One section a directory or file of costs, in order; then one for all logs of single runs."""
        logs = [path for path in self.paths if path.is_file() and not is_costs(path)]
        others = [path for path in self.paths if path not in logs]
        sections: list[Section | Path] = [section_of_table(path) if path.is_dir() else path for path in others]
        return [*sections, section_of_runs(logs)] if logs else sections

    def _render(self, section: Section | Path, directory: Path) -> str:
        if isinstance(section, Path):
            return render_costs(section)
        return render(section, directory, self.page.parent)
