"""Options that many commands share."""

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
