"""A node leaves its coordinator: its daemon drains, and what belongs to the coordinator goes.

Kept are the node's key, which is paid, its receipts, which prove the pay, and what its owner wrote.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from gpu_node.config import NodeSettings
from gpu_node.shell.folder.state import StatePaths, remove_entry
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys import place_beside
from hypergpu.node_report import DEVICE_FOLDERS

_KEPT_NAMES = frozenset({"identity.key", "ledger", "lock", "name", "node.toml", "nonce"})
_COORDINATORS_IDENTITY = "identity"
_LOOK_UP_S = 0.2
_MARGIN_S = 20.0


@contextlib.contextmanager
def drain_daemon(settings: NodeSettings, paths: StatePaths) -> Iterator[None]:
    """Have the daemon that uses the folder finish and end, and hold the folder's lock. Blocks.

    Each daemon is asked once, since a second SIGTERM stops it: also one that takes the folder over.

    Raises:
        HyperGPUError: STATE_LOCKED, none can be asked, or one does not end in its time.
    """
    give_up_at_s, asked_daemon = time.monotonic() + _MARGIN_S, None
    with contextlib.ExitStack() as lock:
        while True:
            try:
                lock.enter_context(paths)
                break
            except HyperGPUError as error:
                if error.reason is not Reason.STATE_LOCKED or time.monotonic() > give_up_at_s:
                    raise
            if (daemon := _ask_to_drain(paths, asked_daemon)) != asked_daemon:
                asked_daemon = daemon
                give_up_at_s = time.monotonic() + settings.drain_limit_ms / 1000 + _MARGIN_S
            time.sleep(_LOOK_UP_S)
        yield


def _ask_to_drain(paths: StatePaths, asked: int | None) -> int | None:
    """Send SIGTERM to the daemon that holds the lock unless it was asked; its process id."""
    try:
        if (daemon := paths.daemon()) is None or daemon == asked:
            return asked
        os.kill(daemon, signal.SIGTERM)
    except ProcessLookupError:
        return asked
    except (OSError, UnicodeError) as error:
        detail = f"the daemon that uses {paths.root} cannot be told: {error}"
        fix = "stop it there (Ctrl-C, systemctl stop), or leave as the user who runs it"
        raise HyperGPUError(Reason.STATE_LOCKED, detail, fix=fix) from error
    return daemon


def forget_coordinator(paths: StatePaths) -> None:
    """Remove certificate, work and caches from a folder whose lock is held, and from those of the
    machine's other devices in it.
    """
    devices = sorted(paths.root.glob(DEVICE_FOLDERS))
    for folder in (paths.root, *devices):
        for entry in folder.iterdir():
            is_kept = entry.name in _KEPT_NAMES or entry.name.startswith("node.log")
            if not is_kept and entry not in devices and not _is_coordinators(entry):
                remove_entry(entry)


def forget_node(paths: StatePaths) -> None:
    """Remove the key with its passphrase and the receipts, too: what they would be paid is lost."""
    for entry in paths.root.iterdir():
        if not _is_coordinators(entry):
            remove_entry(entry)
    with contextlib.suppress(OSError):  # a coordinator's folder may be left in it
        paths.root.rmdir()
    place_beside(paths.root).unlink(missing_ok=True)


def _is_coordinators(entry: Path) -> bool:
    """Whether a coordinator keeps its identity in a folder, which then is none of the node's."""
    return (entry / _COORDINATORS_IDENTITY).is_dir()
