"""What has to be on a chain before work is paid: token and ledger (local chains), bond, jobs."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from coordinator.core.settlement.sending import IN_A_BLOCK
from coordinator.shell.chain.sending import Account, Intent
from coordinator.shell.chain.site import (
    DEPLOY_LEDGER,
    DEPLOY_TOKEN,
    LedgerSite,
    deployed_address,
    opening_purpose,
)
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import AccountName, OutboxRow
from hypergpu.chain import gas
from hypergpu.chain.abi import Abi
from hypergpu.chain.artifacts import artifact
from hypergpu.chain.ledger import CONTRACT, TOKEN, ContractCall, JobTerms, LedgerCalls
from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.signer import contract_address
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, Digest, JobId
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.pay import AMOUNT_MOST
from hypergpu.ledger.typed import Domain

LOCAL_BALANCE_WEI = 10**24
LOCAL_BOND = 1_000_000
"""What a coordinator must post on a ledger that is deployed here: one whole test token."""


class JobOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is opened with on the ledger. Amounts are of the token's smallest unit."""

    job_id: JobId
    unit_price: int
    escrow: int
    """In all: raising it later adds the difference."""
    guaranteed_bps: int
    epochs: int
    """That the job states."""
    model: Digest
    dataset: Digest
    signed_for: Domain = Domain()
    """The ledger in the job's terms; by default none, and any one may settle it."""


class _Home(NamedTuple):
    token: bytes
    ledger: bytes


class _Amount(NamedTuple):
    job_id: JobId
    total: int
    """Escrow that the job then has had in all; it names what is done for it."""
    added: int


def fill_account(chain: EvmChain, account: Account, profile: ChainProfile) -> None:
    """See that the account can pay for gas; a local chain gives it play money.

    Raises:
        HyperGPUError: CHAIN_WRONG, it has nothing on a chain that gives nothing.
        RpcError: the chain cannot be asked.
    """
    if chain.balance_wei(account.address) > 0:
        return
    if not profile.is_local:
        raise HyperGPUError(
            Reason.CHAIN_WRONG,
            f"{account.name.address} has nothing to pay gas with on chain {profile.chain_id}",
            fix="send it some of the chain's currency",
        )
    address = "0x" + account.address.hex()
    chain.rpc.call(Call("anvil_setBalance", (address, hex(LOCAL_BALANCE_WEI))))


def deploy(account: Account, outbox: Outbox, profile: ChainProfile, head: Block) -> bytes:
    """Sign what makes a test token and a ledger, unless that was done before.

    The account is the ledger's guardian, treasury and one arbiter: play money needs no quorum.

    Returns:
        The ledger's address, whether it is mined yet or not.
    """
    known = deployed_address(outbox, account.name, DEPLOY_LEDGER)
    if known is not None:
        return known
    nonce = account.next_nonce()
    home = _Home(
        contract_address(account.address, nonce), contract_address(account.address, nonce + 1)
    )
    options = (
        home.token,
        profile.window_s,
        profile.window_s,
        LOCAL_BOND,
        1,
        account.address,
        account.address,
        [account.address],
    )
    ledger = artifact(CONTRACT)
    code = ledger.code + Abi(ledger.abi).constructor(options)
    calls = LedgerCalls()
    address = Address("0x" + home.ledger.hex())
    mint = calls.mint(Address("0x" + account.address.hex()), LOCAL_BOND)
    intents = [
        Intent(DEPLOY_TOKEN, b"", ContractCall(artifact(TOKEN).code, gas.DEPLOY_TOKEN)),
        Intent(DEPLOY_LEDGER, b"", ContractCall(code, gas.DEPLOY_LEDGER)),
        Intent("bond/mint", home.token, mint),
        Intent("bond/approve", home.token, calls.approve(address, LOCAL_BOND)),
        Intent("bond/post", home.ledger, calls.post_bond(LOCAL_BOND)),
    ]
    account.seal(intents, head)
    return home.ledger


def wanted(site: LedgerSite, account: Account, outbox: Outbox, order: JobOrder) -> list[Intent]:
    """What opens a job with its escrow, or adds to that of one that is open; empty: nothing.

    On a local chain what is added is minted first.
    """
    added = order.escrow
    if site.is_opened(order.job_id):
        added -= sum(amount for _, amount in _deposits(outbox, account.name, order.job_id))
        if added <= 0:
            return []
        purpose = f"{_funding(order.job_id)}{order.escrow}"
        call = site.calls.fund(site.job_key(order.job_id), added)
    else:
        purpose, call = opening_purpose(order.job_id), _opening(site, account, order)
    deposit = Intent(purpose, site.contract, call, order.job_id)
    return [*_provision(site, account, _Amount(order.job_id, order.escrow, added)), deposit]


def _opening(site: LedgerSite, account: Account, order: JobOrder) -> ContractCall:
    terms = JobTerms(
        coordinator=account.name.address,
        model=bytes.fromhex(order.model),
        dataset=bytes.fromhex(order.dataset),
        epochs=max(1, order.epochs),
        unit_price=order.unit_price,
        guaranteed_bps=order.guaranteed_bps,
        # A job that trains fast may rightly spend its whole escrow within one challenge window.
        spend_limit=AMOUNT_MOST,
    )
    return site.calls.open_job(keccak(order.job_id.encode()), terms, order.escrow)


def approval_again(site: LedgerSite, row: OutboxRow) -> Intent | None:
    """What lets the ledger take again what a failed transaction was to bring it; None: nothing.

    The approval in front of it may be gone: one that came later has set the allowance anew, and
    was used up.
    """
    amount = site.calls.taken(row.transaction.call)
    if not amount:
        return None
    purpose = f"approve/{row.transaction.purpose}/{row.transaction.nonce}"
    call = site.calls.approve(Address("0x" + site.contract.hex()), amount)
    return Intent(purpose, site.token(), call, row.transaction.job_id)


def funded_at(outbox: Outbox, account: AccountName, job_id: JobId, escrow: int) -> int | None:
    """The block from which on the ledger has so much escrow of a job; None: it has not.

    Every deposit of the job is in a block by then.
    """
    deposits = _deposits(outbox, account, job_id)
    blocks = [row.block.number for row, _ in deposits if row.state in IN_A_BLOCK and row.block]
    is_enough = sum(amount for _, amount in deposits) >= escrow
    return max(blocks) if blocks and is_enough and len(blocks) == len(deposits) else None


def _deposits(outbox: Outbox, account: AccountName, job_id: JobId) -> list[tuple[OutboxRow, int]]:
    """Everything that brings escrow to a job and is not given up, with how much it brings."""
    names = (opening_purpose(job_id), *outbox.purposes(account, _funding(job_id)))
    # What was given up has the number of its nonce behind its name.
    rows = [outbox.transaction_for(account, name) for name in names if "#" not in name]
    calls = LedgerCalls()
    return [(row, calls.taken(row.transaction.call)) for row in rows if row is not None]


def _provision(site: LedgerSite, account: Account, amount: _Amount) -> Iterator[Intent]:
    """Let the ledger take an amount, which is made first where money is play money.

    For a deposit that was given up both may have been done before. It is made once; whether it may
    still be taken is not known.
    """
    purpose, token = f"{_approval(amount.job_id)}{amount.total}", site.token()
    minting = f"mint/{purpose}"
    if site.profile.is_local and minting not in site.purposes(minting):
        mint = site.calls.mint(account.name.address, amount.added)
        yield Intent(minting, token, mint, amount.job_id)
    ledger = Address("0x" + site.contract.hex())
    if purpose in site.purposes(purpose):
        purpose = f"approve/{purpose}/{account.next_nonce()}"
    yield Intent(purpose, token, site.calls.approve(ledger, amount.added), amount.job_id)


def _approval(job_id: JobId) -> str:
    return f"escrow/{job_id}/"


def _funding(job_id: JobId) -> str:
    return f"fund/{job_id}/"
