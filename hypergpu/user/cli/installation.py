"""How HyperGPU came onto this machine, and the commands that bring a newer one or take it away."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple


class Installation(NamedTuple):
    """A way in which it was installed."""

    kind: str
    """For people."""
    upgrade: tuple[str, ...]
    """Command that brings the newest version."""
    uninstall: tuple[str, ...]
    """Command that takes it away."""
    is_ours: bool = True
    """Whether the command line may run them itself."""


def installation(
    prefix: Path, executable: str, environment: Mapping[str, str], clone: Path | None
) -> Installation:
    """The way, from what lies around.

    Args:
        prefix: Of the environment, as `sys.prefix` names it.
        executable: Its Python.
        environment: Variables of this process.
        clone: Folder of the sources, where the installation is one of a clone.
    """
    if "HYPERGPU_IMAGE" in environment:
        image = environment["HYPERGPU_IMAGE"]
        pull = ("docker", "pull", image)
        return Installation("an image", pull, ("docker", "rmi", image), is_ours=False)
    if clone is not None:
        fetch, make = ("git", "-C", str(clone), "pull"), ("make", "-C", str(clone), "setup")
        remove = ("rm", "-r", str(clone / ".venv"))
        return Installation(f"a clone, {clone}", (*fetch, "&&", *make), remove, is_ours=False)
    if file := environment.get("PEX", ""):
        copy = ("cp", "dist/hypergpu-node.pex", file)
        upgrade_command = ("make", "node-pex", "&&", *copy)
        return Installation(f"one file, {file}", upgrade_command, ("rm", file), is_ours=False)
    if (prefix / "uv-receipt.toml").exists():
        tool = ("uv", "tool")
        return Installation(
            "uv tool", (*tool, "upgrade", "hypergpu"), (*tool, "uninstall", "hypergpu")
        )
    if (prefix / "pipx_metadata.json").exists():
        return Installation(
            "pipx", ("pipx", "upgrade", "hypergpu"), ("pipx", "uninstall", "hypergpu")
        )
    pip = (executable, "-m", "pip")
    return Installation(
        f"pip, in {prefix}",
        (*pip, "install", "--upgrade", "hypergpu"),
        (*pip, "uninstall", "--yes", "hypergpu"),
    )


def command_line(command: Sequence[str]) -> str:
    """A command as a person types it."""
    return " ".join(word if word == "&&" else shlex.quote(word) for word in command)


def this_installation() -> Installation:
    """The way in which this process's own came here."""
    return installation(Path(sys.prefix), sys.executable, os.environ, _clone())


def _clone() -> Path | None:
    """The folder that an editable installation reads, or a program that runs from its sources."""
    sources = Path(__file__).parents[3]
    try:
        origin = json.loads(distribution("hypergpu").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return sources
    return sources if origin.get("dir_info", {}).get("editable") else None
