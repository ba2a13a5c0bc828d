"""Receipts in a file and bundles of disputes, checked by a third party: no coordinator is there."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from hypergpu.cli.ledger.reading import final_block, job_fact
from hypergpu.cli.main import app
from hypergpu.errors import Reason
from hypergpu.ledger.audit.dispute import (
    Claim,
    Dispute,
    decoded_dispute,
    disputes,
    encoded_dispute,
)
from hypergpu.ledger.audit.facts import JobFact
from hypergpu.ledger.receipt import (
    FILE_BYTES_MAX,
    AsOf,
    ReceiptFile,
    SignedReceipt,
    Signers,
    encoded,
)
from hypergpu.ledger.typed import Domain, Voucher, sign, word_bytes
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.units import Wei
from tests.chain.ground import JOB, NODES, PROFILE, Ground
from tests.chain.misbehaving_rpc import Answer, misbehaving
from tests.signed_receipts import COORDINATOR, Work, receipt_record

VICTIM = NODES[0]


@pytest.fixture
def settled(ground: Ground) -> Ground:
    """Epoch 0 is closed and paid: a receipt of each node."""
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0, is_last=True)
    ground.settle()
    return ground


def domain_of(ground: Ground) -> Domain:
    domain = ground.settler.site.domain
    assert domain is not None
    return domain


def signers_of(ground: Ground) -> Signers:
    domain = domain_of(ground)
    return Signers(coordinator=COORDINATOR.address, domain=domain, made_in=domain)


def kept(ground: Ground) -> tuple[SignedReceipt, ...]:
    return tuple(record.signed for record in ground.journal.receipts(JOB))


def written(ground: Ground, file: ReceiptFile) -> Path:
    path = ground.folder / "receipts.jsonl"
    path.write_bytes(encoded(file))
    return path


def ledger(*words: str) -> Result:
    # Of nobody: whoever asked a coordinator would fail by it.
    nobody = {"HYPERGPU_TOKEN": "", "HYPERGPU_ADDRESS": "127.0.0.1:1"}
    return CliRunner().invoke(app, ["ledger", *words], env=nobody)


def fact_of(ground: Ground) -> JobFact:
    site = ground.settler.site
    return job_fact(ground.chain, domain_of(ground), site.job_key(JOB))


def test_a_file_of_receipts_and_the_chain_are_all_that_it_takes(settled: Ground) -> None:
    path = written(settled, ReceiptFile(signers_of(settled), kept(settled)))
    ended = ledger("verify", "--file", str(path), "--chain-url", settled.url)
    assert ended.exit_code == 0, ended.output
    first, second = ended.stdout.splitlines()
    assert first == "4 receipts of 4 nodes are sound, and so is the pay"
    assert second.startswith("the chain recorded them in 1 batch, whose")


def test_without_a_chain_a_file_says_what_was_not_checked(settled: Ground) -> None:
    path = written(settled, ReceiptFile(signers_of(settled), kept(settled)))
    ended = ledger("verify", "--file", str(path))
    assert ended.exit_code == 0, ended.output
    first, second = ended.stdout.splitlines()
    assert first == "4 receipts of 4 nodes are sound"
    assert second.startswith("not yet: no chain was asked: roots, sums, scores, pools and payments")
    assert "an RPC of chain 31337: --chain-url URL" in second


def test_a_file_that_lacks_a_receipt_is_found_out_by_the_chain(settled: Ground) -> None:
    file = ReceiptFile(signers_of(settled), kept(settled)[1:], as_of=head_of(settled))
    path = written(settled, file)
    alone = ledger("verify", "--file", str(path))
    assert alone.exit_code == 0
    ended = ledger("verify", "--file", str(path), "--chain-url", settled.url)
    assert ended.exit_code == Reason.SIGNATURE_INVALID.exit_code
    assert "1 of its 4 receipts is not among those given" in ended.stdout


def head_of(ground: Ground) -> AsOf:
    head = ground.chain.head()
    return AsOf(head.number, head.hash.hex())


def test_a_file_is_of_a_block_that_a_reorganisation_leaves_alone(settled: Ground) -> None:
    head, final = settled.chain.head(), final_block(settled.chain)
    assert final.number == head.number - PROFILE.depth
    settled.ask("anvil_reorg", PROFILE.depth, [])
    assert settled.chain.blocks([final.number]) == [final]
    assert settled.chain.blocks([head.number]) != [head]


def test_a_file_of_before_the_last_receipts_is_told_as_older_and_what_was_not_audited(
    ground: Ground,
) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.rest()
    as_of = head_of(ground)
    path = written(ground, ReceiptFile(signers_of(ground), kept(ground), as_of=as_of))
    ground.earn(0, range(1, 3))
    ground.end(0, is_last=True)
    ground.settle()
    ended = ledger("verify", "--file", str(path), "--chain-url", ground.url)
    assert ended.exit_code == 0, ended.output
    sound, audited, not_audited, *_ = ended.stdout.splitlines()
    assert sound == "4 receipts of 4 nodes are sound"
    assert audited.startswith("audited: 1 batch of which the file holds every receipt")
    since = f"not audited: 8 receipts that the chain has recorded since block {as_of.block}"
    assert not_audited.startswith(since)
    assert "of epoch 0 on the chain are newer than those given" in ended.stdout


@pytest.mark.parametrize("names", ["no block", "a made-up hash", "a block that is not there yet"])
def test_a_file_of_no_block_of_the_chain_lacks_whatever_it_does_not_hold(
    settled: Ground, names: str
) -> None:
    first = head_of(settled)
    as_of = {
        "no block": None,
        "a made-up hash": AsOf(1, "ab" * 32),
        "a block that is not there yet": AsOf(first.block + 100, first.hash),
    }[names]
    path = written(settled, ReceiptFile(signers_of(settled), kept(settled)[:1], as_of=as_of))
    ended = ledger("verify", "--file", str(path), "--chain-url", settled.url)
    assert ended.exit_code == Reason.SIGNATURE_INVALID.exit_code
    assert "3 of its 4 receipts are not among those given" in ended.stdout
    assert "sound" not in ended.stdout
    assert "not yet: the file names no block that this chain has" in ended.stdout


def test_what_somebody_else_closed_the_epoch_of_is_open_and_not_wrong(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.rest()
    ground.ask("evm_setAutomine", True)
    ground.let_pass(10 * PROFILE.window_s)
    job = word_bytes(ground.settler.site.job_key(JOB))
    ground.act_as(NODES[1], ground.settler.site.calls.abi.call("closeEpoch", job, 0))
    ground.earn(0, range(1, 2))
    path = written(ground, ReceiptFile(signers_of(ground), kept(ground)))
    (closed,) = fact_of(ground).epochs
    assert closed.closed_by == NODES[1].address
    ended = ledger("verify", "--file", str(path), "--chain-url", ground.url)
    assert ended.exit_code == 0, ended.output
    assert "epoch 0: 1 receipt from number 1 on is not on the chain yet" in ended.stdout


def test_a_coordinator_that_is_not_the_jobs_is_found_out_by_the_chain(settled: Ground) -> None:
    forger = NODES[1]
    forged = receipt_record(JOB, Work(node=VICTIM, sequence=0), domain=domain_of(settled)).signed
    signature = sign(forger, domain_of(settled).separator(), forged.receipt)
    signers = replace(signers_of(settled), coordinator=forger.address)
    file = ReceiptFile(signers, (replace(forged, signature=signature),))
    path = written(settled, file)
    assert ledger("verify", "--file", str(path)).exit_code == 0
    ended = ledger("verify", "--file", str(path), "--chain-url", settled.url)
    assert ended.exit_code == Reason.SIGNATURE_INVALID.exit_code
    assert f"the coordinator {COORDINATOR.address} did not sign it" in ended.stdout


def test_receipts_signed_for_no_chain_name_the_ledger_that_pays_for_them(ground: Ground) -> None:
    # Kept before any ledger is known: as of a coordinator without a chain.
    ground.earn(0, range(1))
    ground.end(0, is_last=True)
    ground.opened()
    ground.settle()
    nowhere = Signers(coordinator=COORDINATOR.address, domain=Domain(), made_in=Domain())
    file = ReceiptFile(nowhere, kept(ground), settled_on=domain_of(ground))
    ended = ledger("verify", "--file", str(written(ground, file)), "--chain-url", ground.url)
    assert ended.exit_code == 0, ended.output
    assert "and so is the pay" in ended.stdout
    unnamed = written(ground, replace(file, settled_on=None))
    told = ledger("verify", "--file", str(unnamed), "--chain-url", ground.url)
    assert "the file names no ledger that pays for them" in told.stdout


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    ended = ledger("verify", "--file", str(path))
    assert ended.exit_code == Reason.FILE_UNUSABLE.exit_code
    assert f"at most {FILE_BYTES_MAX} are read" in ended.stderr


def bundle(ground: Ground, dispute: Dispute) -> str:
    path = ground.folder / "bundle.json"
    path.write_bytes(encoded_dispute(dispute))
    assert decoded_dispute(path.read_bytes(), source="b") == dispute
    return str(path)


def unpaid_voucher(ground: Ground, amount: int = 10**12) -> Dispute:
    """More than the escrow holds."""
    fact = fact_of(ground)
    said = Voucher(job=fact.job, node=VICTIM.node_id, sequence=1, amount=Wei(amount))
    voucher = SignedVoucher(said, sign(COORDINATOR, domain_of(ground).separator(), said))
    signers = signers_of(ground)
    (made,) = disputes(fact, kept(ground), [voucher], node=VICTIM.node_id, signers=signers)
    assert made.claim is Claim.VOUCHER
    return made


def underpaid(ground: Ground, fact: JobFact) -> Dispute:
    signers = signers_of(ground)
    (made,) = disputes(fact, kept(ground), (), node=VICTIM.node_id, signers=signers)
    assert made.claim is Claim.UNDERPAID
    return made


def test_a_voucher_that_the_escrow_does_not_cover_is_confirmed_to_anybody(settled: Ground) -> None:
    path = bundle(settled, unpaid_voucher(settled))
    settled.mine(3)
    ended = ledger("check", path, "--chain-url", settled.url)
    assert ended.exit_code == 0, ended.output
    assert "the node is right: a voucher promises 1000000000000" in ended.stdout
    assert f"it is so still, by block {settled.chain.head().number}" in ended.stdout
    alone = ledger("check", path)
    assert alone.exit_code == 0
    assert "not yet: whether block" in alone.stdout
    told = json.loads(ledger("check", path, "--chain-url", settled.url, "--json").stdout)
    assert (told["is_right"], told["faults"], told["mended"]) == (True, [], "")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"free": Wei(5)}, "its free is 999988480 by the ledger, the bundle quotes 5"),
        ({"paid": Wei(0)}, "its paid is 2880 by the ledger, the bundle quotes 0"),
        ({"block_hash": "ab" * 32}, "of another chain, or of a block that was reorganised away"),
    ],
)
def test_what_a_bundle_quotes_and_the_chain_does_not_say_is_told(
    settled: Ground, changed: dict[str, object], why: str
) -> None:
    made = unpaid_voucher(settled)
    path = bundle(settled, replace(made, chain=replace(made.chain, **changed)))
    assert ledger("check", path).exit_code == 0
    ended = ledger("check", path, "--chain-url", settled.url)
    assert ended.exit_code == Reason.SIGNATURE_INVALID.exit_code
    assert "the node is not right: " in ended.stdout
    assert why in ended.stdout


def test_a_node_cannot_make_up_a_share_that_was_counted_too_low(settled: Ground) -> None:
    fact = fact_of(settled)
    place = next(n for n, one in enumerate(fact.shares) if one.node == VICTIM.node_id)
    shares = list(fact.shares)
    shares[place] = replace(shares[place], score=shares[place].score - 1)
    path = bundle(settled, underpaid(settled, replace(fact, shares=tuple(shares))))
    alone = ledger("check", path)
    assert alone.exit_code == 0
    assert "the score of 1 receipt recorded in epoch 0 is 2880000" in alone.stdout
    ended = ledger("check", path, "--chain-url", settled.url)
    assert ended.exit_code == Reason.SIGNATURE_INVALID.exit_code
    assert "its score is 2880000 by the ledger, the bundle quotes 2879999" in ended.stdout


def test_a_bundle_against_a_coordinator_that_is_not_the_jobs_convinces_nobody(
    settled: Ground,
) -> None:
    forger = NODES[1]
    made = unpaid_voucher(settled)
    assert made.voucher is not None
    signature = sign(forger, domain_of(settled).separator(), made.voucher.voucher)
    forged = replace(
        made,
        voucher=replace(made.voucher, signature=signature),
        signers=replace(made.signers, coordinator=forger.address),
    )
    ended = ledger("check", bundle(settled, forged), "--chain-url", settled.url)
    assert ended.exit_code == Reason.SIGNATURE_INVALID.exit_code
    assert f"the job's coordinator is {COORDINATOR.address} by the ledger" in ended.stdout


def test_a_bundle_that_does_not_follow_from_itself_needs_no_chain(settled: Ground) -> None:
    made = unpaid_voucher(settled)
    covered = replace(made, chain=replace(made.chain, free=Wei(10**13)))
    ended = ledger("check", bundle(settled, covered))
    assert ended.exit_code == Reason.SIGNATURE_INVALID.exit_code
    assert "the voucher can be redeemed" in ended.stdout


def test_what_was_mended_since_is_said(settled: Ground) -> None:
    late = receipt_record(JOB, Work(node=VICTIM, sequence=1), domain=domain_of(settled)).signed
    (made,) = disputes(
        fact_of(settled),
        (*kept(settled), late),
        (),
        node=VICTIM.node_id,
        signers=signers_of(settled),
    )
    assert made.claim is Claim.UNRECORDED
    path = bundle(settled, made)
    before = ledger("check", path, "--chain-url", settled.url)
    assert "the ledger acts on it: hypergpu ledger enforce" in before.stdout
    settled.act_as(VICTIM, settled.settler.site.calls.record_one(late, 1).call)
    after = ledger("check", path, "--chain-url", settled.url)
    assert after.exit_code == 0
    assert "since then it was mended, by block" in after.stdout
    assert "receipt 1 is among the 2 that are counted" in after.stdout


def test_an_rpc_without_the_bundles_block_is_told_from_one_without_the_job(
    settled: Ground,
) -> None:
    path = bundle(settled, unpaid_voucher(settled))

    def forgets(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        if not any(call["method"] == "eth_call" for call in calls):
            return None
        error = {"code": -32602, "message": "BlockOutOfRangeError: block height is 9"}
        answers = json.loads(truth)
        for answer in answers if isinstance(answers, list) else [answers]:
            answer.pop("result", None)
            answer["error"] = error
        return Answer(json.dumps(answers).encode())

    with misbehaving(settled.url) as rpc:
        rpc.script = lambda calls, truth: (
            forgets(calls, truth)
            if any(isinstance(call["params"][-1], dict) for call in calls if call["params"])
            else None
        )
        ended = ledger("check", path, "--chain-url", rpc.url)
    assert ended.exit_code == Reason.CHAIN_UNREACHABLE.exit_code, ended.output
    assert "does not say how block" in ended.stderr
    assert "an archive node: --chain-url URL" in ended.stderr


def test_a_bundle_whose_signatures_are_wrong_needs_no_chain_to_be_told(settled: Ground) -> None:
    made = unpaid_voucher(settled)
    assert made.voucher is not None
    more = replace(made.voucher.voucher, amount=Wei(10**13))
    path = bundle(settled, replace(made, voucher=replace(made.voucher, voucher=more)))
    ended = ledger("check", path, "--chain-url", "http://127.0.0.1:1")
    assert ended.exit_code == Reason.SIGNATURE_INVALID.exit_code
    assert f"the coordinator {COORDINATOR.address} did not sign the voucher" in ended.stdout
