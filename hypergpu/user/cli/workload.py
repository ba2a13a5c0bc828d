"""`hypergpu workload`: try a workload on this machine before a job needs it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.user.terminal.commands import AsJson, group, usage_error

if TYPE_CHECKING:
    from hypergpu.workloads.entry import Options

app = group("Try workloads on this machine.")


@app.command()
def check(
    name: Annotated[str, typer.Argument(help="A workload, or a package that has some.")],
    *,
    folder: Annotated[
        Path | None, typer.Option("--data", exists=True, file_okay=False, help="Folder of data.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="As in [options]; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a model, train a step, evaluate, export and load, as a job's programs do."""
    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.user.cli.doctor import verdict_line
    from hypergpu.user.cli.verdicts import FAIL
    from hypergpu.user.cli.workload_check import WorkloadChecks, check_entry, entries_named
    from hypergpu.user.terminal.output import say, say_json

    options, checks = _options(option or []), []
    for entry in entries_named(name):
        for outcome in check_entry(entry, options, str(folder.resolve()) if folder else ""):
            checks.append(outcome)
            if not as_json:
                say(verdict_line(outcome))
    failed_names = [each.name for each in checks if each.verdict == FAIL]
    if as_json:
        say_json(WorkloadChecks(not failed_names, checks))
    if failed_names:
        raise HyperGPUError(
            Reason.WORKLOAD_UNFIT, f"{name} does not pass: {', '.join(failed_names)}"
        )


def _options(given: list[str]) -> "Options":
    import msgspec

    options: dict[str, str | int | float | bool] = {}
    for word in given:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise usage_error(f"--option {word[:40]!r} has no value", "give KEY=VALUE")
        try:
            options[key] = msgspec.json.decode(text, type=bool | int | float)
        except msgspec.MsgspecError:
            options[key] = text
    return options
