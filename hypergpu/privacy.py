"""What other users of the machine and child processes are kept from: files of a daemon, and secrets
in the environment.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason

_SECRET = re.compile(r"token|secret|key|passw|passphrase|credential", re.IGNORECASE)
_MAY_HOLD_SECRET = re.compile(
    # Addresses of chains and databases hold keys and logins of those who provide them.
    r"AWS_.*|PG.*|HYPERGPU_.*(CHAIN|DATABASE|EVENTS).*|.*AUTH.*",
    re.IGNORECASE,
)


def holds_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret itself, and not only the name of its file."""
    return bool(_SECRET.search(name)) and not name.upper().endswith("_FILE")


def public_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that any child process may see: none that may hold a secret or name its file."""
    return {
        name: value
        for name, value in environment.items()
        if not (_SECRET.search(name) or _MAY_HOLD_SECRET.fullmatch(name))
    }


def variables_of(*prefixes: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables whose names begin so, for the one child that needs them."""
    return {name: value for name, value in environment.items() if name.startswith(prefixes)}


def make_files_private() -> None:
    """From now on nobody else reads or writes what this process and its children make."""
    os.umask(0o077)


def require_private_folder(folder: Path) -> None:
    """Make a folder that only this user may enter, or check that nobody else can change one.

    A folder that nobody else can enter protects what is in it; else its own folders are checked,
    too. That somebody could read is for the files themselves to prevent.

    Raises:
        HyperGPUError: FOLDER_UNUSABLE, others can change it, with the command that ends this.
        OSError: It cannot be made or read.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if commands := list(_mending_commands(folder)):
        detail = f"other users can change what is in {folder}"
        raise HyperGPUError(Reason.FOLDER_UNUSABLE, detail, fix=" && ".join(commands))


def _mending_commands(folder: Path) -> Iterator[str]:
    is_closed = not stat.S_IMODE(folder.stat().st_mode) & 0o077
    within = [] if is_closed else [path for path in sorted(folder.iterdir()) if path.is_dir()]
    for path in (folder, *within):
        file_stat = path.stat()
        command = mending_command(
            file_stat.st_uid, stat.S_IMODE(file_stat.st_mode), user=os.geteuid()
        )
        if command:
            yield f"{command} {path}"


def mending_command(owner: int, mode: int, *, user: int) -> str:
    """The command that makes a folder one that only ``user`` and root can change; empty: it is."""
    if owner not in (0, user):
        return "chown -R $(id -u)"
    return "chmod go-w" if mode & 0o022 else ""


LOG_BYTES_MAX = 10_000_000


def rotate_log(path: Path) -> None:
    """Set a log aside that has grown beyond LOG_BYTES_MAX, in place of the one before it.

    Programs append to it meanwhile, and go on at its new end. A line may be lost between the two.

    Raises:
        OSError: There is no space for it, or it cannot be written.
    """
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        shutil.copyfile(path, path.with_suffix(".1"), follow_symlinks=False)
        os.truncate(path, 0)
