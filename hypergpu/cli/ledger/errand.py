"""One thing that a node does on its ledger, from its files to what is said of it."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from hypergpu.cli.ledger.acting import Done, Held, NodeOnChain, held_of, node_key
from hypergpu.cli.ledger.reading import job_fact, ledger_at
from hypergpu.cli.ledger.wallet import KEY_FILE
from hypergpu.cli.output import say, say_json
from hypergpu.cli.settings import resolved
from hypergpu.ids import NodeId
from hypergpu.keys.keyfile import stored_address
from hypergpu.ledger.audit.dispute import disputes, encoded_dispute
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


def disputed(state_dir: Path, job: str | None, *, chain_url: str, out: Path) -> Disputed:
    """Write a bundle for everything that a node can prove was not paid as it should be.

    Raises:
        RefusalError: the wallet, the chain or the disk refuses.
    """
    held = held_of(state_dir, job)
    node, terms = NodeId(stored_address(state_dir / KEY_FILE)), held.terms
    signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
    vouchers = [held.voucher] if held.voucher is not None else []
    fact = job_fact(chain_url, terms)
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
    return Disputed(node, held.job_id, files)


def on_ledger(
    errand: Callable[[NodeOnChain, Held], Done], *, whose: Whose, chain_url: str, as_json: bool
) -> None:
    """Open the node's key and wallet, reach the chain, act, and say what came of it.

    Raises:
        RefusalError: the key, the wallet, the chain or the contract refuses.
    """
    given, passphrase_file, job = whose
    settings = resolved({"state_dir": str(given) if given else None})
    state_dir = Path(settings["state_dir"].value).expanduser()
    held = held_of(state_dir, job)
    key = node_key(state_dir, passphrase_file)
    with ledger_at(chain_url) as chain:
        done = errand(NodeOnChain(chain, key, held.terms.domain), held)
    if as_json:
        say_json(done)
        return
    say(f"{done.node}: {done.said}")
    for name in done.hashes:
        say(name)
