"""A node's wallet is read from its files alone."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.wallet import Wallet
from hypergpu.cli.ledger.wallet import wallet_view
from hypergpu.cli.main import app
from hypergpu.refusal import Reason, RefusalError
from tests.unit.node.test_wallet import COORDINATOR, JOB, NODE, TERMS, receipt, voucher


def wallet_folder(root: Path) -> Path:
    """A state folder as the daemon leaves it."""
    with Places(root / "node") as places:
        identity_key(places)
        wallet = Wallet(places, NODE.node_id)
        wallet.agree(JOB, TERMS)
        wallet.take(JOB, [receipt(0), receipt(1)])
        wallet.take_voucher(JOB, voucher(2, 1_500))
        return places.root


def test_a_wallet_shows_key_receipts_and_voucher(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    view = wallet_view(folder)
    (job,) = view.jobs
    assert view.is_encrypted
    assert view.node.startswith("0x")
    assert (job.job, job.coordinator, job.receipts, job.unsound) == (
        JOB,
        COORDINATOR.address,
        2,
        0,
    )
    assert (job.samples, job.vouched) == (200, "1500")


def test_a_receipt_that_was_altered_counts_as_unsound(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    path = folder / "ledger" / JOB / "receipts.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"quality_bps":9000', b'"quality_bps":9999', 1))
    assert wallet_view(folder).jobs[0].unsound == 1


def test_a_last_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    path = folder / "ledger" / JOB / "receipts.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert wallet_view(folder).jobs[0].receipts == 1


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    (folder / "ledger" / JOB / "voucher.json").write_text("{")
    with pytest.raises(RefusalError, match="FILE_UNUSABLE"):
        wallet_view(folder)


def test_the_command_prints_the_wallet(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    printed = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(folder)]).output
    assert str(folder / "identity.key") in printed
    assert JOB in printed
    missing = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(tmp_path / "none")])
    assert missing.exit_code == Reason.FILE_UNUSABLE.exit_code
