"""The command line."""

from collections.abc import Sequence

import tyro

from examples.paper.commands.costs import CostsRun
from examples.paper.commands.gather import Gather
from examples.paper.commands.recorded import Recorded
from examples.paper.commands.report import Report
from examples.paper.commands.run import Run
from examples.paper.commands.show import Show
from examples.paper.commands.table import TableRun

COMMANDS = {
    "run": Run,
    "table": TableRun,
    "gather": Gather,
    "report": Report,
    "costs": CostsRun,
    "recorded": Recorded,
    "show": Show,
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that ``args`` names, by default those of the command line."""
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        args=args,
        description="The experiments of “Kronecker-factored Quasi-Newton Methods for Deep Learning”.",
        prog="python -m examples.paper",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    command.main()
