"""`hypergpu doctor`, `env` and `config show`: what this machine and its settings are."""

import typer

from hypergpu.terminal.commands import group
from hypergpu.terminal.options import AsJson

config = group("See the settings.")


def doctor(*, as_json: AsJson = False) -> None:
    """Try what training needs on this machine; each failure comes with its fix."""
    from hypergpu.cli.machine.checks import FAIL
    from hypergpu.cli.machine.doctor import diagnosis
    from hypergpu.cli.show.verdicts import verdict_line
    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.terminal.output import say, say_json

    found = diagnosis()
    if as_json:
        say_json(found)
    else:
        for check in found.checks:
            say(verdict_line(check))
    failed = [check.name for check in found.checks if check.verdict == FAIL]
    if failed:
        raise HyperGPUError(Reason.MACHINE_UNFIT, f"failed: {', '.join(failed)}")


def env(*, as_json: AsJson = False) -> None:
    """Print versions, machine and settings to paste into an issue; secrets are left out."""
    from hypergpu.cli.machine.environment import environment
    from hypergpu.cli.show.verdicts import environment_lines
    from hypergpu.terminal.output import say, say_json

    found = environment()
    if as_json:
        say_json(found)
        return
    for line in environment_lines(found):
        say(line)


@config.callback()
def _config() -> None:
    """Keeps `show` a command of its own while it is the only one."""


@config.command()
def show(
    *,
    origin: bool = typer.Option(False, "--origin", help="Say what decided each."),
    as_json: AsJson = False,
) -> None:
    """Print the effective settings: flag > environment > file > what `up` left > default."""
    from hypergpu.cli.machine.effective import effective_settings
    from hypergpu.client.settings import config_file, known_settings
    from hypergpu.terminal.output import Column, say, say_json, say_table

    found = effective_settings()
    if as_json:
        say_json(found)
        return
    known = known_settings()
    columns = [Column("setting"), Column("value"), Column("variable")]
    rows = [[each.name, each.value or "-", known[each.name].environment] for each in found.settings]
    if origin:
        columns.append(Column("origin"))
        for row, each in zip(rows, found.settings, strict=True):
            row.append(each.origin)
    say_table(columns, rows, empty="no settings")
    say(f"file: {config_file()}")
