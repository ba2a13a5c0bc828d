"""A node leaves its coordinator: its daemon drains, and what belongs to the coordinator goes.

Kept are the node's key, which is paid, its receipts, which prove the pay, and what its owner wrote.
"""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator

import msgspec

from gpu_node.config import NodeSettings
from gpu_node.shell.state import StatePaths, remove_entry
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys import place_beside
from hypergpu.node_report import DEVICE_FOLDERS, NodeReport

_KEPT_NAMES = frozenset({"identity.key", "ledger", "lock", "name", "node.toml", "nonce"})
_LOOK_UP_S = 0.2
_MARGIN_S = 20.0


@contextlib.contextmanager
def drain_daemon(settings: NodeSettings, paths: StatePaths) -> Iterator[None]:
    """Have the daemon that uses the folder finish and end, and hold the folder's lock. Blocks.

    Raises:
        HyperGPUError: STATE_LOCKED, it does not end in its time.
    """
    give_up_at_s, is_asked = time.monotonic() + settings.drain_limit_ms / 1000 + _MARGIN_S, False
    with contextlib.ExitStack() as lock:
        while True:
            try:
                lock.enter_context(paths)
                break
            except HyperGPUError as taken:
                if taken.reason is not Reason.STATE_LOCKED or time.monotonic() > give_up_at_s:
                    raise
            if not is_asked:
                _send_drain(paths)
                is_asked = True
            time.sleep(_LOOK_UP_S)
        yield


def _send_drain(paths: StatePaths) -> None:
    try:
        report = msgspec.json.decode(paths.report.read_bytes(), type=NodeReport)
        os.kill(report.process_id, signal.SIGTERM)
    except (OSError, msgspec.MsgspecError, UnicodeError) as broken:
        detail = f"the daemon that uses {paths.root} cannot be told: {broken}"
        raise HyperGPUError(Reason.STATE_LOCKED, detail) from broken


def forget_coordinator(paths: StatePaths) -> None:
    """Remove certificate, work and caches from a folder whose lock is held, and from those of the
    machine's other devices in it.
    """
    devices = sorted(paths.root.glob(DEVICE_FOLDERS))
    for folder in (paths.root, *devices):
        for entry in folder.iterdir():
            is_kept = entry.name in _KEPT_NAMES or entry.name.startswith("node.log")
            if not is_kept and entry not in devices:
                remove_entry(entry)


def forget_node(paths: StatePaths) -> None:
    """Remove the key with its passphrase and the receipts, too: what they would be paid is lost."""
    shutil.rmtree(paths.root)
    place_beside(paths.root).unlink(missing_ok=True)
