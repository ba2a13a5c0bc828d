"""Groups of commands, options that many share, and their end: failures are one numbered line and
a status.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, TypeVar

import typer
from typer.core import TyperGroup

from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError, missing_extra

if TYPE_CHECKING:
    from hypergpu.user.client import Coordinator


def usage_error(detail: str, fix: str) -> HyperGPUError:
    """An argument that cannot be meant."""
    return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)


def report_error(failure: Exception) -> int:
    """Tell the person what went wrong; returns the exit status."""
    from hypergpu.jobfile.toml import JobFileError

    if isinstance(failure, JobFileError):
        for problem in failure.problems:
            _line(
                failure.reason.number,
                f"{problem.where or problem.key}: {problem.what}",
                problem.fix,
            )
        return failure.reason.exit_code
    if isinstance(failure, HyperGPUError):
        _line(failure.reason.number, failure.detail, failure.fix)
        return failure.reason.exit_code
    if isinstance(failure, RemoteFailureError):
        _line(failure.number, failure.detail, failure.fix)
        return failure.exit_code
    raise failure


def error_line(number: int, what: str, fix: str) -> str:
    """How every error reads. What ends in a question mark needs no full stop.

    A detail with a fix of its own, as a coordinator's reasons have, gets no second one.
    """
    if "Fix: " in what:
        return f"error {number}: {what}"
    sentence = what.rstrip(".")
    return f"error {number}: {sentence}{'' if sentence.endswith('?') else '.'} Fix: {fix}"


def _line(number: int, what: str, fix: str) -> None:
    text = error_line(number, what, fix)
    if sys.stderr.isatty():
        from hypergpu.user.terminal.output import is_rich

        text = f"\x1b[31m{text}\x1b[0m" if is_rich() else text
    sys.stderr.write(f"{text}\n")


CoordinatorAddress = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="The coordinator; else the token's own."),
]
TokenFile = Annotated[
    str | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Your token; else HYPERGPU_TOKEN, or the one `hypergpu up` left on this machine.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with a stable schema.")]
JobName = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB", help="A job's id or its beginning, or its name; else the newest."
    ),
]
NoConfirmation = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="The coordinator's, which holds its key.")
]
OperatorsPassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file",
        envvar="HYPERGPU_COORDINATOR_PASSPHRASE_FILE",
        help="Opens the key; else the file beside its folder.",
    ),
]
YEAR_S = 31_536_000
JOIN_LINE_NODES = 8
JoinLineNodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        max=100_000,
        help=f"How many nodes may join with the line; else {JOIN_LINE_NODES}.",
    ),
]


def seconds_within(least: float, most: float) -> Callable[[str | float], float]:
    """A parser of lengths of time, such as ``90s`` and ``5m``; a number alone is seconds."""

    def parse(given: str | float) -> float:
        from hypergpu.jobfile.toml import DurationError, duration_ms

        try:
            seconds = float(given)
        except ValueError:
            try:
                seconds = duration_ms(given) / 1000
            except DurationError as wrong:
                raise typer.BadParameter(f"{wrong.what}; {wrong.fix}") from None
        if not least <= seconds <= most:
            raise typer.BadParameter(
                f"{str(given)[:40]} is not in the range from {least:g}s to {most:g}s"
            )
        return seconds

    return parse


# Typer exports no name for what click calls a usage error, only what is derived from it.
UsageError: Any = typer.BadParameter.__bases__[0]
USAGE_STATUS = 2


_FIRST = (
    *("up", "join", "status", "leave", "dashboard", "job", "node", "token", "ledger"),
    *("gateway", "demo", "compare", "netsim"),
)
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

        try:
            return super().invoke(ctx)
        except (HyperGPUError, RemoteFailureError) as failure:
            raise typer.Exit(report_error(failure)) from failure
        except ModuleNotFoundError as error:
            if (extra_error := missing_extra(error)) is None:
                raise
            raise typer.Exit(report_error(extra_error)) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _report_usage(wrong: Any) -> int:
    from hypergpu.errors import Reason

    message = wrong.format_message()
    command = wrong.ctx.command_path if wrong.ctx else "hypergpu"
    option = getattr(wrong, "option_name", "")
    if option[1:].isdecimal():
        # Click takes the sign of a number for that of an option.
        message = f"a number that begins with {option} is below 0, which nothing here takes"
    if message.startswith("Usage:"):  # a group without a command: its help
        typer.echo(message)
    else:
        number = Reason.ARGUMENT_INVALID.number
        typer.echo(error_line(number, message, f"see {command} --help"), err=True)
    return USAGE_STATUS


def group(meaning: str) -> typer.Typer:
    """A named group of commands."""
    return typer.Typer(help=meaning, no_args_is_help=True, rich_markup_mode=None)


_OPTIONS = {"address": CoordinatorAddress, "token_file": TokenFile}
_SharedOptions = TypeVar("_SharedOptions")


def with_options(
    shared: type[_SharedOptions],
) -> Callable[[Callable[Concatenate[_SharedOptions, ...], None]], Callable[..., None]]:
    """Make a command's first argument of options that several commands take.

    Args:
        shared: A named tuple, of which each field is an option.
    """
    fields = inspect.signature(shared).parameters.values()
    option_parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in fields]

    def give_options(
        command: Callable[Concatenate[_SharedOptions, ...], None],
    ) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            own = {each.name: given.pop(each.name) for each in option_parameters}
            command(shared(**own), **given)

        return _with_parameters(run, command, option_parameters)

    return give_options


def on_coordinator(
    command: "Callable[Concatenate[Coordinator, ...], None]",
) -> Callable[..., None]:
    """Give a command a connection as its first argument, and ``--address`` and ``--token-file``."""

    @functools.wraps(command)
    def run(*args: Any, address: str | None, token_file: str | None, **options: Any) -> None:
        # Help must not wait for gRPC to be imported.
        from hypergpu.user.client import connect

        with connect(address, token_file=token_file) as coordinator:
            command(coordinator, *args, **options)

    option_parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _OPTIONS.items()
    ]
    return _with_parameters(run, command, option_parameters)


def _with_parameters(
    run: Callable[..., None], command: Callable[..., None], added: list[inspect.Parameter]
) -> Callable[..., None]:
    """Show typer a command's own parameters but the first, and those that are added."""
    _, *own = inspect.signature(command).parameters.values()
    vars(run).pop("__wrapped__")
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in [*own, *added]}
    return run
