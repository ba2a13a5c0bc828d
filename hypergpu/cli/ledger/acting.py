"""What a node does on the ledger by itself: registers, stakes, redeems vouchers, by its own key."""

import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.chain.ledger import LedgerCalls
from hypergpu.chain.recognition import recognised
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call
from hypergpu.chain.rpc.errors import RpcRefusedError
from hypergpu.chain.signer import Draft, Signer
from hypergpu.cli.ledger.wallet import (
    CONFLICT_FILE,
    KEY_FILE,
    LEDGER_FOLDER,
    RECEIPTS_FILE,
    TERMS_FILE,
    VOUCHER_FILE,
    kept_receipts,
)
from hypergpu.ids import Address, JobKey, NodeId
from hypergpu.keys.keyfile import passphrase_beside, stored_secret
from hypergpu.keys.passphrase import passphrase_of_file
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.typed import Domain, address_bytes, chain_form, word_bytes
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.refusal import Reason, RefusalError
from hypergpu.signature import IdentityKey

GAS = 400_000
"""More than any of these takes."""
_MINED_WITHIN_S = 90.0
_LOOK_EACH_S = 0.2
_FEE_TIMES = 2
_TIP_WEI = 10**9
_LOCAL_CHAIN_ID = 31337
_LOCAL_WEI = 10**18


class Done(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/sent/1"):
    """What was sent and is in a block."""

    node: str
    hashes: list[str]
    said: str


class Held(NamedTuple):
    """What a node holds of one job."""

    job_id: str
    terms: Terms
    receipts: list[SignedReceipt]
    """In order; behind them one that contradicts another, if the coordinator signed such a one."""
    voucher: SignedVoucher | None


class NodeOnChain:
    """One node's account on one ledger."""

    def __init__(self, chain: EvmChain, key: IdentityKey, domain: Domain) -> None:
        """See that the ledger is the one that the node agreed to.

        Raises:
            RefusalError: CHAIN_WRONG, the RPC is of another chain; LEDGER_WRONG, the ledger is not
                there, or another version's.
            RpcError: the chain cannot be asked.
        """
        recognised(chain, domain)
        self._chain = chain
        self._signer = Signer(key)
        self._domain = domain
        self._contract = address_bytes(domain.contract)
        self.calls = LedgerCalls()

    @property
    def node(self) -> NodeId:
        """Whose account it is."""
        return self._signer.node_id

    def register(self, stake: int) -> Done:
        """Register the node, with a stake if it is more than 0."""
        hashes = [self._approved(stake)] if stake else []
        call = self.calls.abi.call("registerNode", bytes(32), stake)
        hashes.append(self.acted(call, "registerNode"))
        return Done(self.node, hashes, f"registered with a stake of {stake}")

    def stake(self, amount: int) -> Done:
        """Add to the node's stake: it is paid at once as far as that covers it."""
        hashes = [self._approved(amount)]
        call = self.calls.abi.call("stake", amount)
        hashes.append(self.acted(call, "stake"))
        return Done(self.node, hashes, f"staked {amount}")

    def claim(self, held: Held) -> Done:
        """Redeem the newest voucher of a job.

        Raises:
            RefusalError: ARGUMENT_INVALID, there is none, or the contract refuses it.
        """
        if held.voucher is None:
            detail = f"this node holds no voucher of {held.job_id}"
            raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix="see hypergpu node wallet")
        said = held.voucher.voucher
        fields = (word_bytes(said.job), self._signer.address, said.sequence, said.amount)
        call = self.calls.abi.call("redeemVoucher", fields, chain_form(held.voucher.signature))
        before = self.paid(said.job)
        hashes = [self.acted(call, "redeemVoucher")]
        paid = self.paid(said.job) - before
        later = "" if paid else "; what stake does not cover is paid after the challenge window"
        return Done(
            self.node, hashes, f"a voucher of {said.amount} was redeemed, {paid} paid{later}"
        )

    def paid(self, job: JobKey) -> int:
        """What the node was paid for a job so far."""
        return self.calls.account(
            self.asked("getAccount", word_bytes(job), self._signer.address)
        ).paid

    def asked(self, name: str, *values: object) -> bytes:
        """What a function of the ledger gives that changes nothing."""
        return self._chain.read(self._contract, self.calls.abi.call(name, *values))

    def acted(self, call: bytes, what: str) -> str:
        """Send a call to the ledger.

        Returns:
            The transaction's hash, once it is in a block.

        Raises:
            RefusalError: the ledger refuses it, or it gets into no block.
        """
        return self._sent(self._contract, call, what)

    def _approved(self, amount: int) -> str:
        """Let the ledger take an amount; on a local chain the play money is made first."""
        (token,) = self.calls.abi.answer("TOKEN", self.asked("TOKEN"))
        address = address_bytes(Address(token))
        if self._domain.chain_id == _LOCAL_CHAIN_ID:
            minted = self.calls.mint(Address(self.node), amount)
            self._sent(address, minted.call, "mint")
        approval = self.calls.approve(self._domain.contract, amount)
        return self._sent(address, approval.call, "approve")

    def _sent(self, to: bytes, call: bytes, what: str) -> str:
        """Send one transaction and wait until it is in a block.

        Raises:
            RefusalError: ARGUMENT_INVALID, the contract refuses it; CHAIN_WRONG, the account has
                nothing to pay gas with; CHAIN_UNREACHABLE, it gets into no block.
        """
        self._refuse_reverting(to, call, what)
        head = self._chain.head()
        draft = Draft(
            chain_id=self._domain.chain_id,
            nonce=self._chain.next_nonce(self._signer.address),
            to=to,
            call=call,
            gas=GAS,
            max_fee_wei=_FEE_TIMES * head.base_fee_wei + _TIP_WEI,
            tip_wei=_TIP_WEI,
        )
        signed = self._signer.sign(draft)
        self._chain.send([(signed.hash, signed.raw)])
        deadline_s = time.monotonic() + _MINED_WITHIN_S
        name = "0x" + signed.hash.hex()
        while time.monotonic() < deadline_s:
            (found,) = self._chain.inclusions([signed.hash])
            if found is not None:
                if not found.is_success:
                    raise RefusalError(Reason.ARGUMENT_INVALID, f"{what} failed in {name}")
                return name
            time.sleep(_LOOK_EACH_S)
        detail = f"{what} ({name}) is in no block after {_MINED_WITHIN_S:g} s"
        raise RefusalError(Reason.CHAIN_UNREACHABLE, detail)

    def _refuse_reverting(self, to: bytes, call: bytes, what: str) -> None:
        own = "0x" + self._signer.address.hex()
        if self._chain.balance_wei(self._signer.address) == 0:
            if self._domain.chain_id != _LOCAL_CHAIN_ID:
                detail = f"{own} has nothing to pay gas with on chain {self._domain.chain_id}"
                raise RefusalError(Reason.CHAIN_WRONG, detail, fix="send it some of its currency")
            self._chain.rpc.call(Call("anvil_setBalance", (own, hex(_LOCAL_WEI))))
        asked = {"from": own, "to": "0x" + to.hex(), "data": "0x" + call.hex()}
        try:
            self._chain.rpc.call(Call("eth_call", (asked, "latest")))
        except RpcRefusedError as refused:
            detail = f"the ledger refuses {what}: {refused}"
            raise RefusalError(
                Reason.ARGUMENT_INVALID, detail, fix="see docs/metering.md"
            ) from None


def node_key(state_dir: Path, passphrase_file: Path | None = None) -> IdentityKey:
    """The node's key, opened by its passphrase file, or by the one beside its folder.

    Raises:
        RefusalError: FILE_UNUSABLE, there is none, or it does not open.
    """
    path = state_dir / KEY_FILE
    if not path.exists():
        detail = f"there is no node's key in {state_dir}"
        raise RefusalError(Reason.FILE_UNUSABLE, detail, fix="name its folder: --state-dir")
    opened = (
        passphrase_of_file(passphrase_file)
        if passphrase_file is not None
        else passphrase_beside(state_dir, path)
    )
    return IdentityKey(stored_secret(path, opened))


def held_of(state_dir: Path, job: str | None) -> Held:
    """What a node holds of a job; of its only one when none is named.

    Raises:
        RefusalError: JOB_UNKNOWN, it holds nothing of it, or of several; FILE_UNUSABLE, a file is
            damaged.
    """
    folders = sorted(path.parent for path in (state_dir / LEDGER_FOLDER).glob(f"*/{TERMS_FILE}"))
    meant = [folder for folder in folders if job is None or folder.name == job]
    if len(meant) != 1:
        names = ", ".join(folder.name for folder in folders) or "nothing"
        detail = f"the wallet in {state_dir} holds {names}: name one job of it"
        raise RefusalError(Reason.JOB_UNKNOWN, detail, fix="see hypergpu node wallet")
    folder = meant[0]
    try:
        terms = msgspec.json.decode((folder / TERMS_FILE).read_bytes(), type=Terms)
        path = folder / VOUCHER_FILE
        stored = path.read_bytes() if path.exists() else None
        voucher = None if stored is None else msgspec.json.decode(stored, type=SignedVoucher)
        receipts = kept_receipts(folder / RECEIPTS_FILE)
        if (folder / CONFLICT_FILE).exists():
            stored = (folder / CONFLICT_FILE).read_bytes()
            receipts.append(msgspec.json.decode(stored, type=SignedReceipt))
    except (OSError, msgspec.MsgspecError) as broken:
        raise RefusalError(Reason.FILE_UNUSABLE, f"{folder}: {broken}") from broken
    return Held(folder.name, terms, receipts, voucher)
