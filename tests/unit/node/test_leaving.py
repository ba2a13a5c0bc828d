"""A machine's node leaves its coordinator."""

from pathlib import Path

from gpu_node.shell.leaving import forget_coordinator
from gpu_node.shell.state import StatePaths


def test_every_device_of_a_machine_keeps_its_key_and_its_receipts(tmp_path: Path) -> None:
    root = tmp_path / "node"
    for folder in (root, root / "device-2"):
        for name in ("identity.key", "tls.key", "blobs/one", "ledger/job/newest.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    with StatePaths(root) as paths:
        forget_coordinator(paths)
    kept = {str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()}
    assert kept == {
        "lock",
        "identity.key",
        "ledger/job/newest.json",
        "device-2/identity.key",
        "device-2/ledger/job/newest.json",
    }
