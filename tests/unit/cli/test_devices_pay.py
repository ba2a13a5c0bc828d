"""Every device of a machine has an account of its own, and one passphrase opens all."""

from pathlib import Path

from hypergpu.errors import Reason
from hypergpu.keys import passphrase_beside, stored_secret
from payments.cli.keys import NODE_KEY, open_key
from tests.unit.cli.conftest import Hypergpu


def make_machine(root: Path) -> bytes:
    """A machine of two devices; gives the second one's key."""
    passphrase = passphrase_beside(root, root / NODE_KEY)
    stored_secret(root / NODE_KEY, passphrase)
    return stored_secret(root / "device-2" / NODE_KEY, passphrase)


def test_a_machines_passphrase_opens_the_key_of_each_device(tmp_path: Path) -> None:
    secret = make_machine(tmp_path / "node")
    assert open_key(tmp_path / "node/device-2", NODE_KEY, None).secret == secret


def test_a_claim_says_how_the_other_devices_are_paid(alone: Hypergpu, tmp_path: Path) -> None:
    root = tmp_path / "node"
    make_machine(root)
    first = alone("ledger", "claim", "--state-dir", str(root))
    assert f"hypergpu ledger claim --state-dir {root}/device-2" in first.stderr
    second = alone("ledger", "claim", "--state-dir", str(root / "device-2"))
    assert second.exit_code == Reason.JOB_UNKNOWN.exit_code
    assert "another device" not in second.stderr
