"""`hypergpu leave`, `upgrade` and `uninstall`: the end of a node, and of what is installed.

What they do is imported when they run: help needs none of it.
"""

from pathlib import Path
from typing import Annotated

import typer

from hypergpu.user.cli.machine import StateDir
from hypergpu.user.terminal.commands import NoConfirmation

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


def leave(
    *,
    state_dir: StateDir = None,
    forget_key: Annotated[
        bool,
        typer.Option("--forget-key", help="Delete the key and receipts, too: unpaid pay is lost."),
    ] = False,
    yes: NoConfirmation = False,
) -> None:
    """Have this machine's node finish, leave its coordinator and delete what came from it."""
    from hypergpu.user.cli.join import leave_coordinator
    from hypergpu.user.client.settings import resolve_settings
    from hypergpu.user.terminal.output import confirm

    settings = resolve_settings({"state_dir": str(state_dir) if state_dir else None})
    folder = Path(settings["state_dir"].value).expanduser()
    if forget_key:
        confirm(f"delete the key in {folder}, and with it all pay that is still owed?", yes=yes)
    leave_coordinator(folder, *(["--forget-key"] if forget_key else []))


def upgrade(*, dry_run: DryRun = False) -> None:
    """Bring the newest version, by the way in which this one was installed."""
    from hypergpu.user.cli.installation import command_line, this_installation
    from hypergpu.user.terminal.output import say

    installation = this_installation()
    say(f"installed by {installation.kind}")
    if installation.is_ours and not dry_run:
        _run(installation.upgrade)
        say("start nodes and coordinators of this machine again")
    else:
        say(f"upgrade it: {command_line(installation.upgrade)}")


def uninstall(*, yes: NoConfirmation = False, dry_run: DryRun = False) -> None:
    """Say what lies where on this machine, and delete it. Keys that may be owed money stay."""
    from hypergpu.user.cli.installation import command_line, this_installation
    from hypergpu.user.cli.removal import places, remove_all, require_idle, size_of
    from hypergpu.user.client.settings import resolve_settings
    from hypergpu.user.terminal.output import confirm, note, say, size

    settings = resolve_settings()
    present_places = places(settings)
    for place in present_places:
        say(f"{place.path}  {size(size_of(place.path))}: {place.meaning}")
        for kept_path in place.kept:
            note(f"  kept: {kept_path}, since {place.why}")
    if not dry_run and present_places:
        require_idle(present_places)
        confirm("delete all of it but for what is kept?", yes=yes)
        # The answer takes its time: a daemon may have begun, and made a key.
        present_places = places(settings)
        require_idle(present_places)
        remove_all(present_places)
    say(f"the programs themselves: {command_line(this_installation().uninstall)}")


def _run(command: tuple[str, ...]) -> None:
    """Run a command to its end on this terminal.

    Raises:
        HyperGPUError: MACHINE_UNFIT, it is not there or failed.
    """
    import subprocess

    from hypergpu.errors import HyperGPUError, Reason
    from hypergpu.user.cli.installation import command_line

    try:
        status = subprocess.run(command, check=False).returncode
    except FileNotFoundError:
        status = 127
    if status:
        detail = f"{command_line(command)} ended with status {status}"
        raise HyperGPUError(Reason.MACHINE_UNFIT, detail, fix="run it yourself")
