"""One thing that a node does on its ledger, from its files to what is said of it."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from hypergpu.cli.ledger.acting import Done, Held, NodeOnChain, held_of, node_key
from hypergpu.cli.ledger.enforcing import enforced
from hypergpu.cli.ledger.reading import job_fact, ledger_at
from hypergpu.cli.ledger.wallet import KEY_FILE
from hypergpu.cli.output import say, say_json
from hypergpu.cli.settings import resolved
from hypergpu.ids import NodeId
from hypergpu.keys.keyfile import stored_address
from hypergpu.ledger.audit.dispute import decoded_dispute, disputes, encoded_dispute
from hypergpu.ledger.receipt import Signers
from hypergpu.refusal import Reason, RefusalError

Whose = tuple[Path | None, Path | None, str | None]
"""State folder, passphrase file and job; None: the usual ones."""


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

    @property
    def said(self) -> str:
        """Where the node stands, in words."""
        lacking = self.receipts - self.recorded
        parts = [f"{self.paid} was paid for {self.recorded} recorded receipts"]
        if lacking > 0:
            parts.append(f"{lacking} more wait for an epoch that is not closed")
        if self.voided != "0":
            parts.append(f"arbiters voided {self.voided}, which only they can answer for")
        return f"by block {self.block} {', '.join(parts)}"


def disputed(state_dir: Path, job: str | None, *, chain_url: str, out: Path) -> Disputed:
    """Write a bundle for everything that a node can prove was not paid as it should be.

    Raises:
        RefusalError: the wallet, the chain or the disk refuses.
    """
    held = _on_chain(held_of(state_dir, job))
    node, terms = NodeId(stored_address(state_dir / KEY_FILE)), held.terms
    signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
    vouchers = [held.voucher] if held.voucher is not None else []
    with ledger_at(chain_url) as chain:
        fact = job_fact(chain, terms.domain, terms.job)
    made = disputes(fact, held.receipts, vouchers, node=node, signers=signers)
    files = []
    for number, dispute in enumerate(made):
        path = out / f"dispute-{held.job_id}-{number}-{dispute.claim.value}.json"
        try:
            out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded_dispute(dispute))
        except OSError as broken:
            detail = f"{path} cannot be written: {broken.strerror}"
            raise RefusalError(Reason.FILE_UNUSABLE, detail) from broken
        files.append(str(path))
    own = next((each for each in fact.accounts if each.node == node), None)
    return Disputed(
        node=node,
        job=held.job_id,
        files=files,
        receipts=len({signed.receipt.sequence for signed in held.receipts}),
        recorded=own.counted if own else 0,
        paid=str(own.paid if own else 0),
        voided=str(own.voided if own else 0),
        block=fact.block,
    )


def on_ledger(
    errand: Callable[[NodeOnChain, Held], Done], *, whose: Whose, chain_url: str, as_json: bool
) -> None:
    """Open the node's key and wallet, reach the chain, act, and say what came of it.

    Raises:
        RefusalError: the key, the wallet, the chain or the contract refuses.
    """
    given, passphrase_file, job = whose
    state_dir = _state_dir(given)
    held = _on_chain(held_of(state_dir, job))
    key = node_key(state_dir, passphrase_file)
    with ledger_at(chain_url) as chain:
        done = errand(NodeOnChain(chain, key, held.terms.domain), held)
    _say(done, as_json=as_json)


def enforce_bundle(bundle: Path, *, whose: Whose, chain_url: str, as_json: bool) -> None:
    """Have a ledger act on a bundle, whoever made it, by the key of this machine's node.

    Raises:
        RefusalError: the bundle, the key, the chain or the contract refuses.
    """
    given, passphrase_file, _ = whose
    try:
        content = bundle.read_bytes()
    except OSError as broken:
        detail = f"{bundle} cannot be read: {broken.strerror}"
        raise RefusalError(Reason.FILE_UNUSABLE, detail) from broken
    dispute = decoded_dispute(content, source=str(bundle))
    key = node_key(_state_dir(given), passphrase_file)
    with ledger_at(chain_url) as chain:
        done = enforced(NodeOnChain(chain, key, dispute.signers.domain), dispute)
    _say(done, as_json=as_json)


def _state_dir(given: Path | None) -> Path:
    settings = resolved({"state_dir": str(given) if given else None})
    return Path(settings["state_dir"].value).expanduser()


def _on_chain(held: Held) -> Held:
    """What is held of a job, if a chain settles it."""
    if not held.terms.domain.chain_id:
        detail = f"{held.job_id} counts on no chain: its coordinator had none when it was created"
        raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix="see hypergpu node wallet")
    return held


def _say(done: Done, *, as_json: bool) -> None:
    if as_json:
        say_json(done)
        return
    say(f"{done.node}: {done.said}")
    for name in done.hashes:
        say(name)
