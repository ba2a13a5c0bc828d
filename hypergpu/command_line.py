"""Command lines of our own programs: how one is started, and how it tells its version."""

import sys
from typing import Any


def program(module: str, *arguments: str) -> list[str]:
    """The command line of one of our programs, never one that lies in the working directory."""
    return [sys.executable, "-P", "-m", module, *arguments]


def version_option(name: str) -> Any:
    """The option by which a program tells its version and ends."""
    # Most programs that start others have no options of typer's.
    import typer

    def say_version(is_wanted: bool) -> None:  # noqa: FBT001 - typer calls it
        if is_wanted:
            from hypergpu.protocol import version_text

            typer.echo(version_text(name))
            raise typer.Exit

    return typer.Option("--version", callback=say_version, is_eager=True, help="Print the version.")
