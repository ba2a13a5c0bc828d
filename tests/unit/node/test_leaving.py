"""A machine's node leaves its coordinator."""

import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from gpu_node.config import NodeSettings
from gpu_node.shell.folder.state import StatePaths
from gpu_node.shell.owner.leaving import drain_daemon, forget_coordinator, forget_node
from hypergpu.node_report import RUNNING, LinkReport, NodeReport


def test_every_device_of_a_machine_keeps_its_key_and_its_receipts(tmp_path: Path) -> None:
    root = tmp_path / "node"
    for folder in (root, root / "device-2"):
        for name in ("identity.key", "tls.key", "blobs/one", "ledger/job/newest.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    with StatePaths(root) as paths:
        forget_coordinator(paths)
    kept_names = {str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()}
    assert kept_names == {
        "lock",
        "identity.key",
        "ledger/job/newest.json",
        "device-2/identity.key",
        "device-2/ledger/job/newest.json",
    }


def test_a_coordinator_in_a_nodes_folder_stays_when_the_node_leaves(tmp_path: Path) -> None:
    root = tmp_path / "node"
    places = ("coordinator/identity/coordinator.key", "coordinator/journal.db", "identity.key")
    for name in places:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    for forget, kept_names in (
        (forget_coordinator, {*places, "lock"}),
        (forget_node, {*places[:2]}),
    ):
        with StatePaths(root) as paths:
            forget(paths)
        left_names = {str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()}
        assert left_names == kept_names
    alone = tmp_path / "alone"
    with StatePaths(alone) as paths:
        forget_node(paths)
    assert not alone.exists()


DAEMON = """
import signal, sys
from pathlib import Path
from gpu_node.shell.folder.state import StatePaths
with StatePaths(Path(sys.argv[1])) as paths:
    print("held", flush=True)
    sys.stdin.readline()
    paths.name_daemon()
    signal.pause()
"""
BYSTANDER = "import sys; sys.stdin.readline()"


def python(*words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", *words]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def test_only_the_daemon_that_holds_the_lock_is_asked_to_drain(tmp_path: Path) -> None:
    """The last daemon's report names a process id that another program has now."""
    paths = StatePaths(tmp_path / "node")
    with python(BYSTANDER) as bystander, python(DAEMON, str(paths.root)) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdin is not None
        assert daemon.stdout.readline() == "held\n"
        last = NodeReport(
            node="0x",
            name="last",
            state=RUNNING,
            process_id=bystander.pid,
            started_at_ms=0,
            at_ms=0,
            link=LinkReport(state="up", since_ms=0),
            state_dir=str(paths.root),
        )
        paths.report.write_bytes(msgspec.json.encode(last))
        daemon.stdin.write("\n")
        with drain_daemon(NodeSettings(state_dir=paths.root), paths):
            assert daemon.wait() == -signal.SIGTERM
        assert paths.daemon() is None
        bystander.communicate("\n")
        assert bystander.returncode == 0
