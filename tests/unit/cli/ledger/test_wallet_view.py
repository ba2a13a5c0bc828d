"""A node's wallet is read from its files alone."""

from pathlib import Path

import msgspec
import pytest
from gpu_node.shell.state.wallet import Wallet
from tests.unit.node.test_wallet import (
    COORDINATOR,
    JOB,
    NODE,
    OTHERS,
    TERMS,
    receipt,
    voucher,
)
from typer.testing import CliRunner

from gpu_node.shell.state.keys import identity_key
from gpu_node.shell.state.places import Places
from hypergpu.cli.ledger.holding import held_of, held_on_ledger
from hypergpu.cli.ledger.wallet import wallet_view
from hypergpu.cli.main import app
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.ledger.terms import terms_of


def wallet_folder(root: Path) -> Path:
    """A state folder as the daemon leaves it."""
    with Places(root / "node") as places:
        identity_key(places)
        wallet = Wallet(places, NODE.node_id)
        wallet.agree(JOB, TERMS)
        wallet.take(JOB, [receipt(0), receipt(1)])
        wallet.take_voucher(JOB, voucher(2, 1_500))
        return places.root


def kept(folder: Path) -> Path:
    """Where the job's receipts lie."""
    return Places(folder).ledger_of(JOB, TERMS.coordinator)


@pytest.mark.parametrize(
    ("asked", "amount"), [([], "1500"), (["--decimals", "18"], "1500 (0.000000000000001500)")]
)
def test_a_voucher_is_shown_with_the_decimals_that_are_named_alone(
    tmp_path: Path, asked: list[str], amount: str
) -> None:
    command = ["node", "wallet", "--state-dir", str(wallet_folder(tmp_path)), *asked]
    printed = CliRunner().invoke(app, command).output
    assert printed.rstrip().endswith(f" {amount}")


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
    path = kept(folder) / "receipts.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"quality_bps":9000', b'"quality_bps":9999', 1))
    (job,) = wallet_view(folder).jobs
    assert (job.unsound, job.unsound_numbers) == (1, (0,))
    printed = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(folder)]).output
    assert f"1 receipt is not what was signed: sequence 0 in {kept(folder)}/receipts" in printed
    assert "delete their lines and start it" in printed


def test_a_line_that_was_deleted_as_told_is_asked_for_again(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    path = kept(folder) / "receipts.jsonl"
    path.write_bytes(lines_of(folder)[1])
    with Places(folder) as places:
        wallet = Wallet(places, NODE.node_id)
        assert [held.receipts for held in wallet.held()] == [0]
        wallet.take(JOB, [receipt(0), receipt(1)])
    (job,) = wallet_view(folder).jobs
    assert (job.receipts, job.unsound, job.incomplete) == (2, 0, "")


def test_a_last_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    path = kept(folder) / "receipts.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert wallet_view(folder).jobs[0].receipts == 1


def lines_of(folder: Path) -> list[bytes]:
    return (kept(folder) / "receipts.jsonl").read_bytes().splitlines(keepends=True)


def test_a_receipt_that_is_missing_is_told_by_its_number(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    (kept(folder) / "receipts.jsonl").write_bytes(lines_of(folder)[1])
    (job,) = wallet_view(folder).jobs
    assert (job.receipts, job.unsound, job.missing, job.unreadable) == (1, 0, 1, 0)
    assert job.incomplete == "1 receipt is missing: number 0"
    held = held_of(folder, None)
    assert [each.receipt.sequence for each in held.receipts] == [1]
    assert held.incomplete == job.incomplete


def test_a_file_that_was_cut_is_told_by_what_the_voucher_counts(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    (kept(folder) / "receipts.jsonl").write_bytes(lines_of(folder)[0][:50])
    (job,) = wallet_view(folder).jobs
    assert (job.receipts, job.missing) == (0, 2)
    printed = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(folder)])
    assert f"incomplete: {JOB}: 0 receipts are sound; 2 receipts are missing: numbers 0 to 1." in (
        printed.output
    )
    assert "asks its coordinator for what is missing" in printed.output


def test_a_voucher_for_more_receipts_than_there_can_be_is_told_and_stays_of_use(
    tmp_path: Path,
) -> None:
    folder = wallet_folder(tmp_path)
    most = 2**64 - 1
    (kept(folder) / "voucher.json").write_bytes(msgspec.json.encode(voucher(most, 1_500)))
    (job,) = wallet_view(folder).jobs
    assert (job.receipts, job.missing, job.vouched) == (2, most - 2, "1500")
    held = held_of(folder, JOB)
    assert held.voucher == voucher(most, 1_500)
    assert held.incomplete == f"{most - 2} receipts are missing: numbers 2 to {most - 1}"


def test_a_line_that_is_no_receipt_is_told_and_the_others_count(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    second = lines_of(folder)[1]
    (kept(folder) / "receipts.jsonl").write_bytes(b"{\xff\n" + second)
    (job,) = wallet_view(folder).jobs
    assert (job.receipts, job.unreadable, job.missing) == (1, 1, 1)
    assert job.incomplete == "1 line is unreadable; 1 receipt is missing: number 0"


def beside(folder: Path, job_id: str) -> Path:
    """Another job's folder in the wallet, with the same in it as the first has."""
    terms = terms_of(TERMS.coordinator, JobId(job_id), TERMS.domain)
    with Places(folder) as places:
        wallet = Wallet(places, NODE.node_id)
        wallet.agree(JobId(job_id), terms)
        wallet.take(JobId(job_id), [receipt(0, terms=terms), receipt(1, terms=terms)])
        wallet.take_voucher(JobId(job_id), voucher(2, 1_500, terms=terms))
        return places.ledger_of(JobId(job_id), terms.coordinator)


@pytest.mark.parametrize("damage", ["no text", "missing", "another job's"])
def test_a_job_with_damaged_terms_is_named_and_the_others_are_told(
    tmp_path: Path, damage: str
) -> None:
    folder = wallet_folder(tmp_path)
    broken = beside(folder, "job-0000000000ff")
    path = broken / "terms.json"
    other = (kept(folder) / "terms.json").read_bytes()
    path.write_bytes(other if damage == "another job's" else b"{\xff\n")
    if damage == "missing":
        path.unlink()
    sound, damaged = wallet_view(folder).jobs
    assert (sound.job, sound.receipts, sound.vouched, sound.damaged) == (JOB, 2, "1500", "")
    assert (damaged.job, damaged.receipts, damaged.vouched) == ("job-0000000000ff", 2, "0")
    assert (damaged.key, damaged.coordinator) == ("", TERMS.coordinator)
    assert damaged.damaged.startswith(f"{path}: ")
    printed = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(folder)])
    assert printed.exit_code == 0
    assert f"damaged: job-0000000000ff: {path}: " in printed.output
    assert "is told them again by its coordinator" in printed.output
    assert "a voucher is T0 vouched" in printed.output
    rows = [line.split() for line in printed.output.splitlines() if line.startswith("job-")]
    assert [row[0] for row in rows] == [JOB, "job-0000000000ff"]
    assert "unknown" in rows[1]
    assert held_of(folder, None).job_id == JOB
    assert held_on_ledger(folder, None).job_id == JOB
    with pytest.raises(HyperGPUError, match=f"{path}: .*Fix: A node that starts"):
        held_of(folder, "job-0000000000ff")


def test_terms_that_no_receipt_was_signed_for_are_named_as_what_is_damaged(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    path = kept(folder) / "terms.json"
    path.write_bytes(path.read_bytes().replace(b":31337", b":1"))
    (job,) = wallet_view(folder).jobs
    assert (job.receipts, job.unsound, job.vouched) == (2, 2, "0")
    assert job.damaged.startswith(f"{path}: no receipt was signed for these terms. A node that")
    printed = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(folder)]).output
    assert "delete their lines" not in printed


@pytest.mark.parametrize("damage", ["altered", "cut"])
def test_a_damaged_voucher_is_named_and_the_receipts_beside_it_count(
    tmp_path: Path, damage: str
) -> None:
    folder = wallet_folder(tmp_path)
    path = kept(folder) / "voucher.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b":1500", b":91500") if damage == "altered" else whole[:-9])
    (job,) = wallet_view(folder).jobs
    assert (job.receipts, job.unsound, job.vouched) == (2, 0, "0")
    assert job.damaged.startswith(f"{path}: ")
    assert "asks its coordinator for the voucher: hypergpu join" in job.damaged
    held = held_of(folder, JOB)
    assert (held.voucher, held.damaged, len(held.receipts)) == (None, job.damaged, 2)
    printed = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(folder)]).output
    assert f"damaged: {JOB}: {path}: " in printed
    assert any(line.startswith(JOB) for line in printed.splitlines())

    with Places(folder) as places:
        wallet = Wallet(places, NODE.node_id)
        (job,) = wallet_view(folder).jobs
        assert job.damaged.startswith(f"{kept(folder) / 'voucher.damaged-1.json'} holds no voucher")
        wallet.take_voucher(JOB, voucher(2, 1_500))
    (job,) = wallet_view(folder).jobs
    assert (job.vouched, job.damaged) == ("1500", "")


@pytest.mark.parametrize("name", ["terms.json", "conflict.json"])
def test_who_names_a_job_with_a_file_that_is_no_text_is_told_the_folder(
    tmp_path: Path, name: str
) -> None:
    folder = wallet_folder(tmp_path)
    said = {"terms.json": b'{"job":"\xff"}', "conflict.json": b'{"receipt":{"job":"\xff"}}'}
    (kept(folder) / name).write_bytes(said[name])
    with pytest.raises(HyperGPUError, match=f"FILE_UNUSABLE.*{JOB}"):
        held_of(folder, JOB)


def test_a_wallet_without_its_key_is_refused(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    (folder / "identity.key").write_text("{")
    with pytest.raises(HyperGPUError, match="FILE_UNUSABLE"):
        wallet_view(folder)


@pytest.mark.parametrize("given", [JOB, JOB[:-2], JOB.removeprefix("job-"), "00000", None])
def test_a_job_of_the_wallet_is_named_by_the_beginning_of_its_id(
    tmp_path: Path, given: str | None
) -> None:
    assert held_of(wallet_folder(tmp_path), given).job_id == JOB


@pytest.mark.parametrize("given", ["", "job-1", "1", "b-0"])
def test_a_job_that_the_wallet_does_not_hold_is_told(tmp_path: Path, given: str) -> None:
    with pytest.raises(HyperGPUError, match="name one job of it"):
        held_of(wallet_folder(tmp_path), given)


def test_a_beginning_that_several_jobs_have_names_none_and_a_whole_id_its_own(
    tmp_path: Path,
) -> None:
    folder = wallet_folder(tmp_path)
    longer = f"{JOB}0"
    beside(folder, longer)
    with pytest.raises(HyperGPUError, match=f"holds {JOB}, {longer}: name one"):
        held_of(folder, "0000")
    assert held_of(folder, JOB).job_id == JOB
    assert held_of(folder, longer).job_id == longer


def test_a_folder_that_an_older_version_named_is_read(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    kept(folder).rename(folder / "ledger" / JOB)
    (job,) = wallet_view(folder).jobs
    assert (job.job, job.receipts, job.vouched) == (JOB, 2, "1500")
    held = held_of(folder, JOB)
    assert (held.job_id, len(held.receipts)) == (JOB, 2)


def test_jobs_of_one_id_are_told_apart_by_who_signs_for_them(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    with Places(folder) as places:
        Wallet(places, NODE.node_id).agree(JOB, OTHERS)
    first, second = sorted(f"{JOB}@{terms.coordinator}" for terms in (TERMS, OTHERS))
    assert [job.job for job in wallet_view(folder).jobs] == [JOB, JOB]
    with pytest.raises(HyperGPUError, match=f"holds {first}, {second}: name one"):
        held_of(folder, JOB)
    held = held_of(folder, f"{JOB}@{OTHERS.coordinator}")
    assert (held.job_id, held.terms, held.receipts) == (JOB, OTHERS, [])


def test_the_command_prints_the_wallet(tmp_path: Path) -> None:
    folder = wallet_folder(tmp_path)
    printed = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(folder)]).output
    assert str(folder / "identity.key") in printed
    assert JOB in printed
    missing = CliRunner().invoke(app, ["node", "wallet", "--state-dir", str(tmp_path / "none")])
    assert missing.exit_code == Reason.FILE_UNUSABLE.exit_code
