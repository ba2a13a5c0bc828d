"""Options that many commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Address = Annotated[
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


def seconds_within(least: float, most: float) -> Callable[[str | float], float]:
    """A parser of lengths of time, such as ``90s`` and ``5m``; a number alone is seconds."""

    def parse(given: str | float) -> float:
        from hypergpu.jobfile.duration import DurationError, duration_ms

        try:
            seconds = float(given)
        except ValueError:
            try:
                seconds = duration_ms(given) / 1000
            except DurationError as wrong:
                raise typer.BadParameter(f"{wrong.what}; {wrong.fix}") from None
        if not least <= seconds <= most:
            raise typer.BadParameter(f"{given} is not in the range from {least:g}s to {most:g}s")
        return seconds

    return parse
