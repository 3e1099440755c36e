"""``report``: tables, figures and a page from results."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.markdown import Markdown

from examples.paper.sources import table_in
from workloads import environment

if TYPE_CHECKING:
    from examples.paper.page import Section


@dataclass(frozen=True)
class Report:
    """Print the tables of finished runs; with --page, also write them to a page, with figures beside it.

    Example: python -m examples.paper report runs/table-1 runs/table-8 --page results.md
    """

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of `table`, logs of `run`, files of `gather` and `costs`, in the order of the page's sections."""
    page: Path | None = None
    """The page, in Markdown. Figures, as PNG, go to a directory beside it."""

    def main(self) -> None:
        self._check()
        try:
            text = self._text()
        except ValueError as error:
            raise SystemExit(error.args[0]) from None
        Console().print(Markdown(text))
        if self.page is not None:
            self.page.parent.mkdir(parents=True, exist_ok=True)
            self.page.write_text(text)
            print(f"Written to {self.page}")

    def _check(self) -> None:
        if not self.paths:
            raise SystemExit("Name at least one directory or file.")
        missing = [str(path) for path in self.paths if not path.exists()]
        if missing:
            raise SystemExit(f"Not there: {', '.join(missing)}")
        if self.page is not None and (not self.page.suffix or self.page.is_dir()):
            raise SystemExit(
                f"--page {self.page} is no name of a file: figures go to a directory of the page's name "
                f"without its suffix, so give it one, as in {self.page}.md."
            )

    def _text(self) -> str:
        """The page; draws its figures where it is to be written."""
        from examples.paper.costs import render_costs
        from examples.paper.page import render  # with matplotlib and pandas, which take their time

        command = environment.command("examples.paper")
        blocks = [f"# Results\n\nMade by `{command}`; every number comes from the logs of the runs."]
        taken: set[str] = set()
        for section in self._sections():
            if isinstance(section, Path):
                blocks.append(render_costs(section))
            else:
                own = section.beside(taken)
                taken |= own.figures
                blocks.append(render(own, self.page))
        return "\n\n".join(blocks) + "\n"

    def _sections(self) -> "list[Section | Path]":
        """One section a table or file of costs, in order; then one for all single runs."""
        from examples.paper.costs import is_costs
        from examples.paper.page import section_of_runs, section_of_table

        runs = [path for path in self.paths if path.is_file() and not is_costs(path) and table_in(path) is None]
        others = [path for path in self.paths if path not in runs]
        sections: list[Section | Path] = [path if is_costs(path) else section_of_table(path) for path in others]
        return [*sections, section_of_runs(runs)] if runs else sections
