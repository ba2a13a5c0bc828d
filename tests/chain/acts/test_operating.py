"""An operator's bond and escrow come back by the commands alone."""

import pytest

from hypergpu.chain.keylock import KeyLock, usual_locks
from hypergpu.chain.moments import moment
from hypergpu.errors import Reason
from hypergpu.ids import Address
from tests.chain.acts.hands import EACH, WINDOW_S, Hands, refused, told
from tests.chain.ground import ESCROW, JOB, NODES, PROFILE, Ground
from tests.signed_receipts import COORDINATOR, node_key

NEVER_OPENED = "job-0b0000000000"
BOND = 1_000_000
"""What a ledger of the ground asks for."""


def shown(amount: int) -> str:
    return f"{amount} ({amount // 10**6}.{amount % 10**6:06d})"


@pytest.fixture
def ended(ground: Ground, hands: Hands) -> Hands:
    """Two receipts of each node are paid, and no coordinator runs."""
    ground.ask("evm_setAutomine", False)
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.settle()
    ground.crash()
    ground.ask("evm_setAutomine", True)
    for job_id in (JOB, NEVER_OPENED):
        (hands.data / "jobs" / job_id).mkdir(parents=True)
    return hands


def test_a_bond_is_made_as_high_as_it_is_to_be_and_no_higher(ended: Hands) -> None:
    has = told(ended.as_operator("bond", "--json"))
    assert (has["node"], has["hashes"]) == (COORDINATOR.node_id, [])
    assert has["said"] == f"the bond is {shown(BOND)} already: nothing was sent"
    for sent in (3, 0):
        more = told(ended.as_operator("bond", str(BOND + 5), "--json"))
        assert (len(more["hashes"]), more["amounts"]["bond"]) == (sent, str(BOND + 5))
    said = refused(ended.as_operator("bond", "7"), Reason.ARGUMENT_INVALID)
    assert said == (
        f"error 6002: a bond of {shown(7)} opens no job. Fix: post at least {shown(BOND)}\n"
    )


def test_an_ended_jobs_escrow_and_then_the_bond_come_back_to_the_last_unit(ended: Hands) -> None:
    said = refused(ended.as_operator("unbond"), Reason.ARGUMENT_INVALID)
    assert said == (
        f"error 6002: jobs of {COORDINATOR.node_id} count on its bond of {shown(BOND)}, 1 in all:"
        f" {JOB}. Fix: end each first, also where its escrow is empty:"
        f" hypergpu ledger reclaim JOB --data-dir {ended.data}\n"
    )
    said = refused(ended.as_operator("reclaim", JOB), Reason.ARGUMENT_INVALID)
    assert said.startswith(f"error 6002: end {JOB} on the ledger for good, in {WINDOW_S} s? ")
    assert "Fix: answer beforehand: --yes" in said

    free = ESCROW - 2 * EACH * len(NODES)
    first = told(ended.as_operator("reclaim", JOB, "--yes", "--json"))
    ends_at_s = ended.ground.chain.head().time_s + 2 * WINDOW_S
    assert (first["ready_at_s"], first["amounts"]) == (ends_at_s, {"free": str(free)})
    assert f"until {moment(ends_at_s - WINDOW_S)} and ends at {moment(ends_at_s)}" in first["said"]
    early = told(ended.as_operator("reclaim", "00000", "--json"))
    assert (early["hashes"], early["ready_at_s"]) == ([], ends_at_s)

    ended.pass_time(2 * WINDOW_S)
    taken = told(ended.as_operator("reclaim", JOB, "--json"))
    assert taken["said"] == f"{shown(free)} of {JOB} was paid back; jobs that count on the bond: 0"
    assert ended.has(COORDINATOR) == free
    again = told(ended.as_operator("reclaim", JOB, "--json"))
    assert (again["hashes"], again["said"]) == (
        [],
        f"nothing of {JOB} is free: nothing was sent; jobs that count on the bond: 0",
    )

    asked = told(ended.as_operator("unbond", "--json"))
    ready_at_s = ended.ground.chain.head().time_s + WINDOW_S
    assert (asked["ready_at_s"], len(asked["hashes"])) == (ready_at_s, 1)
    assert "which ends when a job is opened on it" in ended.as_operator("bond").stdout
    early = told(ended.as_operator("unbond", "--json"))
    assert (early["ready_at_s"], early["hashes"]) == (ready_at_s, [])
    ended.pass_time()
    back = told(ended.as_operator("unbond", "--json"))
    assert back["said"] == f"the bond of {shown(BOND)} was paid back"
    assert ended.has(COORDINATOR) == free + BOND
    said = refused(ended.as_operator("unbond"), Reason.ARGUMENT_INVALID)
    assert f"{COORDINATOR.node_id} has no bond on {ended.contract}" in said


def test_a_coordinator_that_runs_is_not_robbed_of_its_nonces(ended: Hands) -> None:
    held = KeyLock(usual_locks(), PROFILE.chain_id, Address(COORDINATOR.node_id))
    said = refused(ended.as_operator("bond", str(2 * BOND)), Reason.FOLDER_UNUSABLE)
    assert f"the key of {COORDINATOR.node_id} is used on chain 31337 by another process" in said
    assert "Fix: end the coordinator first" in said
    held.release()
    told(ended.as_operator("bond", str(2 * BOND), "--json"))


def test_a_job_a_key_or_a_ledger_that_is_not_there_is_told(ended: Hands) -> None:
    said = refused(ended.as_operator("reclaim", "job-0", "--yes"), Reason.JOB_UNKNOWN)
    assert f"'job-0' may be {JOB}, {NEVER_OPENED}" in said
    said = refused(ended.as_operator("reclaim", "job-f", "--yes"), Reason.JOB_UNKNOWN)
    assert f"{ended.contract} knows no job-f of {COORDINATOR.node_id}: " in said
    assert "UnknownJob(job 0x" in said
    assert f"this folder has the files of {JOB}, {NEVER_OPENED}; or another folder" in said
    contract, ended.contract = ended.contract, Address("0x" + "ab" * 20)
    said = refused(ended.as_operator("bond"), Reason.LEDGER_WRONG)
    assert f"there is no contract at 0x{'ab' * 20} on chain 31337" in said
    ended.contract = Address("the ledger")
    said = refused(ended.as_operator("bond"), Reason.ARGUMENT_INVALID)
    assert "'the ledger' is no address. Fix: name it like this: --ledger-contract 0x" in said
    ended.contract = contract
    key = ended.data / "identity" / "coordinator.key"
    key.unlink()
    said = refused(ended.as_operator("unbond"), Reason.FILE_UNUSABLE)
    assert f"there is no coordinator's key in {ended.data}" in said
    assert not key.exists()


def test_another_key_has_neither_bond_nor_job_there(ended: Hands) -> None:
    (ended.data / "identity" / "coordinator.key").write_text(node_key(50).secret.hex())
    (ended.data.parent / "data.passphrase").unlink(missing_ok=True)
    said = refused(ended.as_operator("unbond"), Reason.ARGUMENT_INVALID)
    assert f"{node_key(50).node_id} has no bond on {ended.contract}" in said
    refused(ended.as_operator("reclaim", JOB, "--yes"), Reason.JOB_UNKNOWN)
