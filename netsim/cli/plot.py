"""`plot`: draws a world's links over time."""

from pathlib import Path
from typing import Annotated

import typer

from hypergpu.terminal.options import seconds_within
from hypergpu.terminal.output import say
from netsim.link.error import NetsimError
from netsim.network.picture import world_svg
from netsim.network.world_file import read_world_file


def plot(
    world: Annotated[Path, typer.Argument(metavar="WORLD.toml", help="See docs/netsim/README.md.")],
    *,
    out: Annotated[Path | None, typer.Option("--out", help="Else WORLD.svg here.")] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--for",
            parser=seconds_within(1, 86_400),
            metavar="DURATION",
            help="Length of the picture: 90s, 5m.",
            show_default="2m",
        ),
    ] = 120.0,
) -> None:
    """Draw rates, delays, losses and faults of a world's links as an SVG picture."""
    description = read_world_file(world)
    path = out or Path(f"{description.name}.svg")
    try:
        path.write_text(world_svg(description, round(seconds * 1e6)), encoding="utf-8")
    except OSError as error:
        fix = "name a file that may be written: --out FILE.svg"
        raise NetsimError(f"{path} cannot be written: {error.strerror}", fix) from error
    say(f"written: {path}")
