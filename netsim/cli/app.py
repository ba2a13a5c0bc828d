"""The commands as one typer app. A failure ends in one numbered line with the fix."""

from typing import Any

import typer

from hypergpu.terminal.commands import Commands
from netsim.cli.check import check
from netsim.cli.plot import plot
from netsim.cli.profiles import profiles
from netsim.cli.run import run
from netsim.cli.shape import shape
from netsim.network.signals import SignalledError


class NetsimCommands(Commands):
    """Ends with the exit status of a signal that ended the work."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except SignalledError as signalled:
            raise typer.Exit(signalled.status) from signalled


app = typer.Typer(
    name="netsim",
    cls=NetsimCommands,
    help="Networks like the internet: list link profiles, check emulated links, run programs and"
    " jobs over them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (profiles, check, shape, run, plot):
    app.command()(command)
