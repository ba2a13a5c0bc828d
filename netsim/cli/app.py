"""The group of commands, and how they fail: one numbered line with the fix."""

from typing import Any

import typer

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.terminal.commands import Commands
from hypergpu.terminal.failure import report
from netsim.cli import checking, holding, listing, plotting, running
from netsim.error import NetsimError
from netsim.network.ground.signals import SignalledError


class NetsimCommands(Commands):
    """Reports what netsim refuses as the command line reports everything else."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except NetsimError as refused:
            failure = HyperGPUError(Reason.NETWORK_REFUSED, refused.detail, fix=refused.fix)
            raise typer.Exit(report(failure)) from refused
        except SignalledError as signalled:
            raise typer.Exit(signalled.status) from signalled


app = typer.Typer(
    name="netsim",
    cls=NetsimCommands,
    help="The bad internet, four ways: what links there are, whether they are true, and jobs over"
    " them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(listing.profiles)
app.command()(checking.check)
app.command()(holding.shape)
app.command()(running.run)
app.command()(plotting.plot)
