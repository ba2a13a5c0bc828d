"""A group of commands whose failures end in one numbered line and an exit status."""

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from hypergpu.errors import HyperGPUError
from hypergpu.extras import missing_extra

# Typer exports no name for what click calls a usage error, only what is derived from it.
UsageError: Any = typer.BadParameter.__bases__[0]
USAGE_STATUS = 2


_FIRST = ("up", "join", "job", "node", "token", "ledger", "demo", "compare", "netsim")
"""Commands at the top of the list of help, in the order in which a user meets them."""


class Commands(TyperGroup):
    """Reports the errors of commands, wrong usage included."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of help."""
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line; leaves with its exit status."""
        is_program = extra.pop("standalone_mode", True)
        extra["standalone_mode"] = False
        if not is_program:
            return super().main(*args, **extra)
        try:
            status = super().main(*args, **extra)
        except UsageError as wrong:
            status = _report_usage(wrong)
        except typer.Abort:
            status = 130
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        from hypergpu.errors import RemoteFailureError
        from hypergpu.terminal.failure import report

        try:
            return super().invoke(ctx)
        except (HyperGPUError, RemoteFailureError) as failure:
            raise typer.Exit(report(failure)) from failure
        except ModuleNotFoundError as missing:
            if (lacking := missing_extra(missing)) is None:
                raise
            raise typer.Exit(report(lacking)) from missing
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _report_usage(wrong: Any) -> int:
    message = wrong.format_message()
    command = wrong.ctx.command_path if wrong.ctx else "hypergpu"
    option = getattr(wrong, "option_name", "")
    if option[1:].isdecimal():
        # Click takes the sign of a number for that of an option.
        message = f"a number that begins with {option} is below 0, which nothing here takes"
    if message.startswith("Usage:"):  # a group without a command: its help
        typer.echo(message)
    else:
        from hypergpu.errors import Reason
        from hypergpu.terminal.failure import error_line

        number = Reason.ARGUMENT_INVALID.number
        typer.echo(error_line(number, message, f"see {command} --help"), err=True)
    return USAGE_STATUS


def group(meaning: str) -> typer.Typer:
    """A named group of commands."""
    return typer.Typer(help=meaning, no_args_is_help=True, rich_markup_mode=None)
