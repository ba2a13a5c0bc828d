"""Something is wrong and a node can prove it: bundles from the chain, and what anybody does by one.

The coordinator here is the settler of the ground: it settles what its journal holds, and is silent
of what it signed beside that.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from eth_account import Account
from gpu_node.shell.state.wallet import Wallet
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from gpu_node.shell.state.places import Places
from hypergpu.cli.main import app
from hypergpu.errors import Reason
from hypergpu.ids import Address
from hypergpu.ledger.audit.dispute import Claim, Dispute, decoded_dispute, dispute_fault
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.terms import Terms, terms_of
from hypergpu.ledger.typed import (
    Domain,
    Voucher,
    address_bytes,
    chain_form,
    job_key,
    sign,
    word_bytes,
)
from hypergpu.signature import IdentityKey
from hypergpu.units import Wei
from tests.chain.ground import JOB, NODES, PROFILE, Ground
from tests.signed_receipts import COORDINATOR, Work, node_key, receipt_record

VICTIM = NODES[0]
ANYBODY = node_key(99)
SHARE = 320 * 9_000 * 1_000 // 10**6
"""What a receipt of the ground earns."""
UNBONDING_S = PROFILE.window_s


@pytest.fixture
def settled(ground: Ground) -> Ground:
    """Epoch 0 is closed and paid: a receipt of each node."""
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0, is_last=True)
    ground.settle()
    # From here on each transaction has its own block, as soon as it is sent.
    ground.ask("evm_setAutomine", True)
    return ground


def signed(ground: Ground, sequence: int, *, quality_bps: int = 9_000) -> SignedReceipt:
    """A receipt of the victim with both signatures, in whatever journal it is or is not."""
    work = Work(node=VICTIM, sequence=sequence, quality_bps=quality_bps)
    return receipt_record(JOB, work, domain=ground.settler.site.domain).signed


def state_of(folder: Path, key: IdentityKey) -> Path:
    """A state folder with nothing but a key, as an early version wrote it."""
    folder.mkdir()
    path = folder / "identity.key"
    path.write_text(key.secret.hex())
    path.chmod(0o600)
    return folder


def wallet_of(ground: Ground, *receipts: SignedReceipt) -> Path:
    """The victim's state folder, with what its daemon was given."""
    folder = state_of(ground.folder / "victim", VICTIM)
    with Places(folder) as places:
        wallet = Wallet(places, VICTIM.node_id)
        terms = terms_of(Address(COORDINATOR.node_id), JOB, ground.settler.site.domain)
        wallet.agree(JOB, terms)
        for receipt in receipts:
            wallet.take(JOB, [receipt])
    return folder


def ledger(ground: Ground, *words: str) -> Result:
    return CliRunner().invoke(app, ["ledger", *words, "--chain-url", ground.url])


def told(ended: Result) -> dict[str, Any]:
    assert ended.exit_code == 0, ended.output
    said = json.loads(ended.stdout)
    assert isinstance(said, dict)
    return said


def disputed(ground: Ground, wallet: Path) -> list[Dispute]:
    """The bundles that the command writes, each as a third party reads and checks it."""
    out = ground.folder / "bundles"
    said = told(ledger(ground, "dispute", "--state-dir", str(wallet), "--out", str(out), "--json"))
    bundles = [decoded_dispute(Path(name).read_bytes(), source=name) for name in said["files"]]
    assert [dispute_fault(bundle) for bundle in bundles] == [""] * len(bundles)
    return bundles


def enforced(ground: Ground, bundle: Path) -> Result:
    """The bundle in the hands of somebody who has nothing to do with the job."""
    folder = ground.folder / "anybody"
    if not folder.exists():
        state_of(folder, ANYBODY)
    return ledger(ground, "enforce", str(bundle), "--state-dir", str(folder), "--json")


def bundle_in(ground: Ground, claim: Claim) -> Path:
    whole = f"{JOB}@{COORDINATOR.node_id}"
    (found,) = (ground.folder / "bundles").glob(f"dispute-{whole}-*-{claim.value}.json")
    return found


def test_what_was_paid_as_it_should_be_is_said_with_its_figures(settled: Ground) -> None:
    wallet = wallet_of(settled, signed(settled, 0))
    plain = ledger(settled, "dispute", "--state-dir", str(wallet))
    block = settled.chain.head().number
    assert plain.stdout == (
        f"nothing about {JOB} is to be disputed: by block {block} {SHARE} (0.00{SHARE}) was"
        " paid for 1 recorded receipt\n"
    )
    assert disputed(settled, wallet) == []


def test_a_receipt_that_was_kept_back_is_recorded_by_anybody_and_paid(settled: Ground) -> None:
    wallet = wallet_of(settled, signed(settled, 0), signed(settled, 1))
    (bundle,) = disputed(settled, wallet)
    assert (bundle.claim, bundle.epoch) == (Claim.UNRECORDED, 0)
    assert [one.signed.receipt.sequence for one in bundle.receipts] == [1]
    path = bundle_in(settled, Claim.UNRECORDED)
    done = told(enforced(settled, path))
    assert done["node"] == ANYBODY.node_id
    assert done["said"] == f"1 receipt of {VICTIM.node_id} is recorded, to be paid with epoch 1"
    assert settled.account(VICTIM.node_id).counted == 2

    # Nor does it need the coordinator to close the epoch and to pay.
    site = settled.settler.site
    job = word_bytes(site.job_key(JOB))
    for call in (
        site.calls.abi.call("closeEpoch", job, 1),
        site.calls.abi.call("distributePayments", job, 1, [address_bytes(VICTIM.node_id)]),
    ):
        settled.let_pass(UNBONDING_S + 1)
        settled.act_as(ANYBODY, call)
    assert settled.wallet(address_bytes(VICTIM.node_id)) == 2 * SHARE
    assert disputed(settled, wallet) == []
    again = told(enforced(settled, path))
    assert (again["hashes"], again["said"]) == (
        [],
        "all is recorded by now, 1 receipt: nothing was sent",
    )


def test_many_receipts_take_no_block_each(settled: Ground) -> None:
    wallet = wallet_of(settled, *(signed(settled, number) for number in range(20)))
    disputed(settled, wallet)
    settled.ask("evm_setAutomine", False)
    settled.ask("evm_setIntervalMining", 1)
    done = told(enforced(settled, bundle_in(settled, Claim.UNRECORDED)))
    settled.ask("evm_setIntervalMining", 0)
    assert settled.account(VICTIM.node_id).counted == 20
    places = settled.chain.inclusions([bytes.fromhex(name[2:]) for name in done["hashes"]])
    blocks = [place.block_number for place in places if place is not None]
    assert len(blocks) == 19
    assert blocks == sorted(blocks)
    assert len(set(blocks)) < 10


@pytest.fixture
def recording(ground: Ground) -> Ground:
    """Epoch 0 is open: a receipt of each node is recorded, and no more will be."""
    ground.opened()
    ground.earn(0, range(1))
    ground.rest()
    ground.ask("evm_setAutomine", True)
    return ground


def test_what_is_not_recorded_yet_is_disputed_once_it_is_left_out(recording: Ground) -> None:
    wallet = wallet_of(recording, signed(recording, 0), signed(recording, 1))
    assert disputed(recording, wallet) == []
    plain = ledger(recording, "dispute", "--state-dir", str(wallet))
    assert "1 more is not recorded yet, which can be disputed once" in plain.stdout

    recording.let_pass(PROFILE.window_s)
    recording.mine()
    (bundle,) = disputed(recording, wallet)
    assert (bundle.claim, bundle.epoch) == (Claim.UNRECORDED, 0)
    path = bundle_in(recording, Claim.UNRECORDED)
    assert "the node is right" in ledger(recording, "check", str(path)).stdout
    done = told(enforced(recording, path))
    assert done["said"].endswith("is recorded, to be paid with epoch 0")
    assert recording.account(VICTIM.node_id).counted == 2


def test_what_is_not_recorded_is_disputed_as_soon_as_the_jobs_end_is_announced(
    recording: Ground,
) -> None:
    wallet = wallet_of(recording, signed(recording, 0), signed(recording, 1))
    site = recording.settler.site
    end = site.calls.abi.call("requestReclaim", word_bytes(site.job_key(JOB)))
    recording.act_as(COORDINATOR, end)
    (bundle,) = disputed(recording, wallet)
    assert (bundle.claim, bundle.epoch) == (Claim.UNRECORDED, 0)
    told(enforced(recording, bundle_in(recording, Claim.UNRECORDED)))
    assert recording.account(VICTIM.node_id).counted == 2
    assert disputed(recording, wallet) == []


def test_two_receipts_of_one_number_cost_the_coordinator_its_bond(settled: Ground) -> None:
    wallet = wallet_of(settled, signed(settled, 0), signed(settled, 0, quality_bps=1))
    (bundle,) = disputed(settled, wallet)
    assert bundle.claim is Claim.EQUIVOCATION
    path = bundle_in(settled, Claim.EQUIVOCATION)
    done = told(enforced(settled, path))
    assert done["said"] == (
        f"the coordinator {COORDINATOR.node_id} lost its bond of 1000000, a tenth of it to you"
    )
    assert settled.wallet(address_bytes(ANYBODY.node_id)) == 100_000
    again = told(enforced(settled, path))
    assert (again["hashes"], again["said"]) == (
        [],
        f"the coordinator {COORDINATOR.node_id} has no bond to lose any more: nothing was sent",
    )


def test_a_bundle_that_proves_nothing_is_refused_before_anything_is_sent(settled: Ground) -> None:
    wallet = wallet_of(settled, signed(settled, 0), signed(settled, 1))
    (bundle,) = disputed(settled, wallet)
    path = settled.folder / "altered.json"
    chain = replace(bundle.chain, counted=2)
    path.write_bytes(msgspec.json.encode(replace(bundle, chain=chain)))
    refused = enforced(settled, path)
    assert refused.exit_code == Reason.ARGUMENT_INVALID.exit_code
    assert refused.stderr == (
        "error 6002: the bundle does not prove that something is unrecorded: receipt 1 is among"
        " the 2 that are counted. Fix: ask for another one\n"
    )


def test_what_was_never_on_a_chain_has_nothing_to_be_disputed_there(ground: Ground) -> None:
    folder = state_of(ground.folder / "victim", VICTIM)
    with Places(folder) as places:
        terms: Terms = terms_of(Address(COORDINATOR.node_id), JOB, Domain())
        Wallet(places, VICTIM.node_id).agree(JOB, terms)
    refused = ledger(ground, "dispute", "--state-dir", str(folder))
    assert refused.exit_code == Reason.ARGUMENT_INVALID.exit_code
    assert refused.stderr == (
        f"error 6002: {JOB} was signed for no chain: a ledger acts on no receipt of it, whichever"
        " settles it later. Fix: see what that recorded and paid: hypergpu ledger verify"
        f" {JOB}; have its shares paid: hypergpu ledger claim {JOB} --chain-url URL"
        " --ledger-contract ADDRESS\n"
    )


def delegated(ground: Ground, to: Address) -> None:
    """Have the coordinator's account run a contract's code from now on (EIP-7702)."""
    account = Account.from_key(COORDINATOR.secret)
    nonce = ground.chain.next_nonce(address_bytes(COORDINATOR.address))
    chain = {"chainId": PROFILE.chain_id}
    own = account.sign_authorization({**chain, "address": address_bytes(to), "nonce": nonce + 1})
    money = {"gas": 200_000, "maxFeePerGas": 10**11, "maxPriorityFeePerGas": 10**9, "value": 0}
    where = {"type": 4, "nonce": nonce, "to": address_bytes(ANYBODY.address), "data": b""}
    made = account.sign_transaction({**chain, **where, **money, "authorizationList": [own]})
    raw = "0x" + bytes(made.raw_transaction).hex()
    receipt: Any = ground.ask("eth_sendRawTransactionSync", raw)
    assert receipt["status"] == "0x1"
    assert ground.ask("eth_getCode", COORDINATOR.address, "latest") != "0x"


def test_a_coordinator_key_that_delegates_stays_bound_by_what_it_signed(settled: Ground) -> None:
    site = settled.settler.site
    key = job_key(COORDINATOR.address, JOB)
    voucher = Voucher(job=key, node=VICTIM.node_id, sequence=1, amount=Wei(SHARE + 7))
    signature = chain_form(sign(COORDINATOR, site.domain.separator(), voucher))
    delegated(settled, site.domain.contract)  # It knows no signatures.
    fields = (word_bytes(key), address_bytes(VICTIM.node_id), voucher.sequence, voucher.amount)
    call = "0x" + site.calls.abi.call("redeemVoucher", fields, signature).hex()
    asked = {"from": VICTIM.address, "to": site.domain.contract, "data": call}
    assert int(str(settled.ask("eth_call", asked, "latest")), 16) == 7
