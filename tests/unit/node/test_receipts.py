from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from gpu_node.shell.state.paths import StatePaths
from gpu_node.shell.state.receipts import (
    NEWEST_FILE,
    TALLY_FILE,
    TERMS_FILE,
    OwnTally,
    ReceiptKeeper,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId
from hypergpu.statements.domain import Domain, Terms
from hypergpu.statements.receipt import SignedReceipt
from tests.properties.statements.strategies import JOB, TERMS, Work, node_key, signed_receipt

NODE = node_key(1)
SCORE = 320 * 9_000


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path)


def keeper(paths: StatePaths) -> ReceiptKeeper:
    return ReceiptKeeper(paths, NODE.node_id)


def receipt(number: int, *, before: int | None = None) -> SignedReceipt:
    """The receipt of a round, the node's ``number``-th."""
    total = number * SCORE if before is None else before
    return signed_receipt(NODE, Work(round=number), sequence=number, before=total)


def file(paths: StatePaths, name: str) -> Path:
    return paths.ledger / TERMS.job / name


def test_the_newest_receipt_of_a_job_is_kept_over_restarts(paths: StatePaths) -> None:
    first = keeper(paths)
    first.agree(JOB, TERMS)
    first.take(JOB, [receipt(0), receipt(1)])
    first.take(JOB, [receipt(0)])
    assert keeper(paths).newest() == ((JOB, receipt(1)),)
    stored = msgspec.json.decode(file(paths, NEWEST_FILE).read_bytes(), type=SignedReceipt)
    assert stored == receipt(1)


def test_a_receipt_that_counts_less_than_the_one_before_replaces_nothing(paths: StatePaths) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    mine.take(JOB, [receipt(1)])
    mine.take(JOB, [receipt(2, before=0)])
    assert mine.newest() == ((JOB, receipt(1)),)


@pytest.mark.parametrize(
    ("signed", "why"),
    [
        (signed_receipt(node_key(2), Work()), "another job or node"),
        (msgspec.structs.replace(receipt(0), signature=bytes(65)), "did not sign it"),
    ],
)
def test_a_receipt_that_is_not_owed_to_this_node_is_refused(
    paths: StatePaths, signed: SignedReceipt, why: str
) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    with pytest.raises(HyperGPUError, match=why) as refused:
        mine.take(JOB, [signed])
    assert refused.value.reason is Reason.SIGNATURE_INVALID
    assert mine.newest() == ()


def test_a_receipt_of_an_unknown_job_needs_its_terms(paths: StatePaths) -> None:
    mine = keeper(paths)
    with pytest.raises(HyperGPUError, match="knows no terms"):
        mine.take(JOB, [receipt(0)])
    with pytest.raises(HyperGPUError, match="another job's"):
        mine.take(JobId("job-other"), [receipt(0)], TERMS)
    mine.take(JOB, [receipt(0)], TERMS)
    assert keeper(paths).newest() == ((JOB, receipt(0)),)


def test_a_job_never_changes_its_ledger(paths: StatePaths) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    moved = Terms(TERMS.job, TERMS.coordinator, Domain(1, Address("0x" + "99" * 20)))
    assert "now on chain 1, contract 0x99" in mine.changed_terms(JOB, moved)
    with pytest.raises(HyperGPUError, match="counts on chain 31337"):
        mine.agree(JOB, moved)
    assert mine.changed_terms(JOB, TERMS) == ""


@pytest.mark.parametrize("name", [TERMS_FILE, NEWEST_FILE, TALLY_FILE])
def test_a_damaged_file_is_put_aside_and_made_again(paths: StatePaths, name: str) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    mine.count_accepted(TERMS, 0, 320)
    mine.take(JOB, [receipt(0)])
    file(paths, name).write_bytes(file(paths, name).read_bytes()[:-9])
    again = keeper(paths)
    again.take(JOB, [receipt(1)], TERMS)
    again.count_accepted(TERMS, 1, 320)
    assert file(paths, name + ".damaged").exists()
    assert keeper(paths).newest() == ((JOB, receipt(1)),)


def test_an_acceptance_that_is_heard_of_twice_counts_once(paths: StatePaths) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    for round_number in (0, 1, 1, 0):
        mine.count_accepted(TERMS, round_number, 320)
    stored = msgspec.json.decode(file(paths, TALLY_FILE).read_bytes(), type=OwnTally)
    assert stored == OwnTally(accepted=2, samples=640, last_round=1)


def test_a_coordinator_that_counts_too_few_updates_is_named_once(paths: StatePaths) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    for round_number in range(20):
        mine.count_accepted(TERMS, round_number, 320)
    with capture_logs() as logs:
        mine.take(JOB, [receipt(0)])
        mine.take(JOB, [receipt(1)])
    (warning,) = [each for each in logs if each["log_level"] == "warning"]
    assert (warning["receipts"], warning["accepted"]) == (1, 20)
    assert "hypergpu ledger claim" in warning["fix"]


def test_work_without_terms_leaves_nothing_behind(paths: StatePaths) -> None:
    keeper(paths).agree(JOB, Terms())
    assert not paths.ledger.exists()
