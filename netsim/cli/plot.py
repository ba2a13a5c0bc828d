"""Draws a world's links over time."""

from pathlib import Path

from hypergpu.terminal.output import say
from netsim.link.error import NetsimError
from netsim.network.picture import world_svg
from netsim.network.world_file import read_world_file


def plot_world(world: Path, out: Path | None, seconds: float) -> None:
    """Write the picture of a world file, by default as WORLD.svg in the working directory.

    Raises:
        NetsimError: The file describes no world, or the picture cannot be written.
    """
    description = read_world_file(world)
    path = out or Path(f"{description.name}.svg")
    try:
        path.write_text(world_svg(description, round(seconds * 1e6)), encoding="utf-8")
    except OSError as error:
        fix = "name a file that may be written: --out FILE.svg"
        raise NetsimError(f"{path} cannot be written: {error.strerror}", fix) from error
    say(f"written: {path}")
