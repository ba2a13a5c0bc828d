"""One thing that a node does on its ledger, from its files to what is said of it."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from hypergpu.chain.addresses import address_of
from hypergpu.chain.keylock import KeyLock, usual_locks
from hypergpu.chain.moments import moment
from hypergpu.chain.sent.acts import ActFile
from hypergpu.cli.ledger.account import shown
from hypergpu.cli.ledger.acts.account import AccountOnChain
from hypergpu.cli.ledger.acts.claiming import claimed
from hypergpu.cli.ledger.acts.done import Done
from hypergpu.cli.ledger.acts.enforcing import enforced
from hypergpu.cli.ledger.acts.meant import Where, counts_nowhere, ledger_meant
from hypergpu.cli.ledger.acts.node import NodeOnChain
from hypergpu.cli.ledger.acts.operating import OperatorOnChain, OwnFolder
from hypergpu.cli.ledger.asking import nodes_rpc, operators_rpc
from hypergpu.cli.ledger.holding import (
    coordinator_key,
    held_of,
    held_on_ledger,
    jobs_of,
    node_key,
)
from hypergpu.cli.ledger.reading import job_fact, ledger_at, standings, token_decimals
from hypergpu.cli.ledger.repeated import repeats
from hypergpu.cli.ledger.wallet import KEY_FILE, MENDED_BY, OWNER_MARK
from hypergpu.client.settings import resolve_settings
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, NodeId
from hypergpu.keys.keyfile import stored_address
from hypergpu.ledger.audit.dispute import decoded_dispute, disputes, encoded_dispute
from hypergpu.ledger.receipt import Signers
from hypergpu.ledger.typed import Domain
from hypergpu.terminal.output import note, say, say_json
from hypergpu.units import are, several

Whose = tuple[Path | None, Path | None, str | None]
"""State folder, passphrase file and job; None: the usual ones."""
Operators = tuple[Path | None, Path | None, str]
"""Data folder and passphrase file, None: the usual ones; and the ledger."""


class Disputed(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/disputed/1"):
    """What a node can show to others."""

    node: str
    job: str
    files: list[str]
    """A bundle each, which proves itself: `hypergpu.ledger.audit.dispute`."""
    receipts: int
    """That the node holds."""
    recorded: int
    """Of the node, by the chain."""
    paid: str
    """To the node for the job, by the chain; whole units, as text."""
    voided: str
    """Of its shares, by arbiters."""
    block: int
    """That all of it holds for."""

    pending: str
    """What a voucher claims and its window still holds; whole units, as text."""
    pending_until_s: int | None
    """By the chain's clock; None: nothing is pending."""
    credit: str
    """What the token would not transfer to the node; whole units, as text."""
    unclaimed: str
    """That the newest voucher promises beyond all of this; whole units, as text."""
    decimals: int
    """Of the token."""

    @property
    def said(self) -> str:
        """Where the node stands, in words."""
        lacking = self.receipts - self.recorded
        recorded = several(self.recorded, "recorded receipt")
        parts = [f"{self._shown(self.paid)} was paid for {recorded}"]
        if lacking > 0:
            parts.append(
                f"{lacking} more {are(lacking)} not recorded yet, which can be disputed once the"
                " epoch is closed, a later one is being recorded, the job's end is announced, or"
                " nothing is recorded for a challenge window"
            )
        if self.voided != "0":
            voided = self._shown(self.voided)
            parts.append(f"arbiters voided {voided}, which only they can answer for")
        if self.pending_until_s is not None:
            until = moment(self.pending_until_s)
            parts.append(f"{self._shown(self.pending)} of its voucher is pending until {until}")
        if self.credit != "0":
            parts.append(f"{self._shown(self.credit)} is credit")
        if self.unclaimed != "0":
            parts.append(f"{self._shown(self.unclaimed)} of its voucher is not claimed")
        waits = self.pending_until_s is not None or (self.credit, self.unclaimed) != ("0", "0")
        how = ": hypergpu ledger claim takes it" if waits else ""
        return f"by block {self.block} {', '.join(parts)}{how}"

    def _shown(self, amount: str) -> str:
        return shown(amount, self.decimals)


def disputed(state_dir: Path, job: str | None, *, chain_url: str, out: Path) -> Disputed:
    """Write a bundle for everything that a node can prove was not paid as it should be.

    Raises:
        HyperGPUError: the wallet, the chain or the disk refuses.
    """
    held = held_of(state_dir, job)
    if not held.terms.domain.chain_id:
        raise counts_nowhere(held)
    node, terms = NodeId(stored_address(state_dir / KEY_FILE)), held.terms
    signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
    vouchers = [held.voucher] if held.voucher is not None else []
    with ledger_at(nodes_rpc(chain_url, terms.domain, held.job_id)) as chain:
        fact = job_fact(chain, terms.domain, terms.job)
        has = standings(chain, terms.domain, terms.job, [node])[node]
        decimals = token_decimals(chain, terms.domain)
    if held.incomplete:
        note(f"what {held.job_id} shows is less than it was: {held.incomplete}. {MENDED_BY}")
    if held.damaged:
        note(held.damaged)
    made = disputes(fact, held.receipts, vouchers, node=node, signers=signers)
    files = []
    of_job = f"dispute-{held.job_id}{OWNER_MARK}{terms.coordinator}-{node[:10]}"
    for number, dispute in enumerate(made):
        path = out / f"{of_job}-{number}-{dispute.claim.value}.json"
        try:
            out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded_dispute(dispute))
        except OSError as broken:
            detail = f"{path} cannot be written: {broken.strerror}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
        files.append(str(path))
    own = next((each for each in fact.accounts if each.node == node), None)
    voided = own.voided if own else 0
    promised = held.voucher.voucher.amount if held.voucher is not None else 0
    return Disputed(
        node=node,
        job=held.job_id,
        files=files,
        receipts=len({signed.receipt.sequence for signed in held.receipts}),
        recorded=own.counted if own else 0,
        paid=str(has.paid),
        voided=str(voided),
        block=fact.block,
        pending=str(has.pending),
        pending_until_s=has.release_at_s if has.pending else None,
        credit=str(has.credit),
        unclaimed=str(max(0, promised - has.paid - has.pending - voided)),
        decimals=decimals,
    )


@repeats("--state-dir")
def on_ledger(
    errand: Callable[[NodeOnChain], Done], *, whose: Whose, where: Where, as_json: bool
) -> None:
    """Open the node's key, reach the ledger of its jobs, act, and say what came of it.

    Raises:
        HyperGPUError: the key, the wallet, the chain or the contract refuses.
    """
    given, passphrase_file, job = whose
    state_dir = _state_dir(given)
    held = held_on_ledger(state_dir, job)
    key = node_key(state_dir, passphrase_file)
    with ledger_meant(held, where) as (chain, ledger):
        done = errand(NodeOnChain(chain, key, ledger))
    _say(done, as_json=as_json)


@repeats("--state-dir")
def claim_job(to: str | None, *, whose: Whose, where: Where, as_json: bool) -> None:
    """Take what the node of this machine is owed for a job.

    Raises:
        HyperGPUError: the key, the wallet, the chain or the contract refuses.
    """
    given, _, job = whose
    held = held_of(_state_dir(given), job)
    if held.damaged:
        note(held.damaged)
    payee = None if to is None else address_of(to, "--to")
    on_ledger(
        lambda node: claimed(node, held, payee),
        whose=whose,
        where=where,
        as_json=as_json,
    )


@repeats("--data-dir")
def as_operator(
    errand: Callable[[OperatorOnChain], Done], *, whose: Operators, chain_url: str, as_json: bool
) -> None:
    """Open the coordinator's key while no coordinator uses it, act, and say what came of it.

    Raises:
        HyperGPUError: FOLDER_UNUSABLE, the coordinator runs; or the key, the chain or the contract
            refuses.
    """
    given, passphrase_file, contract = whose
    settings = resolve_settings({"data_dir": str(given) if given else None})
    ledger = address_of(contract, "--ledger-contract")
    folder = Path(settings["data_dir"].value).expanduser()
    key = coordinator_key(folder, passphrase_file)
    with ledger_at(operators_rpc(chain_url)) as chain:
        domain = Domain(chain.chain_id(), ledger)
        lock = _sole_use(domain, Address(key.node_id))
        try:
            own = OwnFolder(ActFile(folder, domain.chain_id), jobs_of(folder))
            done = errand(OperatorOnChain(chain, key, domain, own))
        finally:
            lock.release()
    _say(done, as_json=as_json)


def _sole_use(domain: Domain, address: Address) -> KeyLock:
    try:
        return KeyLock(usual_locks(), domain.chain_id, address)
    except HyperGPUError as used:
        fix = "end the coordinator first, and start it afterwards with: hypergpu up"
        raise HyperGPUError(used.reason, used.detail, fix=fix) from used


@repeats("--state-dir")
def enforce_bundle(bundle: Path, *, whose: Whose, chain_url: str, as_json: bool) -> None:
    """Have a ledger act on a bundle, whoever made it, by the key of this machine's node.

    Raises:
        HyperGPUError: the bundle, the key, the chain or the contract refuses.
    """
    given, passphrase_file, _ = whose
    try:
        content = bundle.read_bytes()
    except OSError as broken:
        detail = f"{bundle} cannot be read: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    dispute = decoded_dispute(content, source=str(bundle))
    key, domain = node_key(_state_dir(given), passphrase_file), dispute.signers.domain
    with ledger_at(nodes_rpc(chain_url, domain, "")) as chain:
        done = enforced(AccountOnChain(chain, key, domain), dispute)
    _say(done, as_json=as_json)


def _state_dir(given: Path | None) -> Path:
    settings = resolve_settings({"state_dir": str(given) if given else None})
    return Path(settings["state_dir"].value).expanduser()


def _say(done: Done, *, as_json: bool) -> None:
    if as_json:
        say_json(done)
        return
    say(f"{done.node}: {done.said}")
    for name in done.hashes:
        say(name)
