"""A node's wallet is read from its files alone."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.state.places import Places
from gpu_node.shell.state.wallet import Wallet
from hypergpu.cli.ledger.holding import held_of
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


@pytest.mark.parametrize("name", ["voucher.json", "receipts.jsonl", "terms.json"])
def test_a_job_with_a_damaged_file_is_named_and_the_others_are_told(
    tmp_path: Path, name: str
) -> None:
    folder = wallet_folder(tmp_path)
    broken = folder / "ledger" / "job-0000000000ff"
    shutil.copytree(folder / "ledger" / JOB, broken)
    (broken / name).write_bytes(b"{\xff\n")
    sound, damaged = wallet_view(folder).jobs
    assert (sound.job, sound.receipts, sound.vouched, sound.damaged) == (JOB, 2, "1500", "")
    assert (damaged.job, damaged.receipts, damaged.vouched) == (broken.name, 0, "0")
    assert damaged.damaged
    printed = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(folder)])
    assert printed.exit_code == 0
    assert f"damaged: {broken.name}: " in printed.output
    assert "a voucher is T0 vouched" in printed.output
    assert any(line.startswith(JOB) for line in printed.output.splitlines())


def test_a_wallet_without_its_key_is_refused(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    (folder / "identity.key").write_text("{")
    with pytest.raises(RefusalError, match="FILE_UNUSABLE"):
        wallet_view(folder)


@pytest.mark.parametrize("given", [JOB, JOB[:-2], JOB.removeprefix("job-"), "00000", None])
def test_a_job_of_the_wallet_is_named_by_the_beginning_of_its_id(
    tmp_path: Path, given: str | None
) -> None:
    assert held_of(wallet_folder(tmp_path), given).job_id == JOB


@pytest.mark.parametrize("given", ["", "job-1", "1", "b-0"])
def test_a_job_that_the_wallet_does_not_hold_is_told(tmp_path: Path, given: str) -> None:
    with pytest.raises(RefusalError, match="name one job of it"):
        held_of(wallet_folder(tmp_path), given)


def test_a_beginning_that_several_jobs_have_names_none_and_a_whole_id_its_own(
    tmp_path: Path,
) -> None:
    folder = wallet_folder(tmp_path)
    longer = f"{JOB}0"
    shutil.copytree(folder / "ledger" / JOB, folder / "ledger" / longer)
    with pytest.raises(RefusalError, match=f"holds {JOB}, {longer}: name one"):
        held_of(folder, "0000")
    assert held_of(folder, JOB).job_id == JOB
    assert held_of(folder, longer).job_id == longer


def test_the_command_prints_the_wallet(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    printed = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(folder)]).output
    assert str(folder / "identity.key") in printed
    assert JOB in printed
    missing = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(tmp_path / "none")])
    assert missing.exit_code == Reason.FILE_UNUSABLE.exit_code
