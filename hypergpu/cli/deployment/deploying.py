"""Makes a ledger with the coordinator's key, exactly one however often it is asked.

The signed bytes are kept before they are sent, as every act of the coordinator's key, and whatever
takes their place has their nonce.
Where a contract comes to lie follows from the nonce: of several signings comes one ledger at most.
"""

from pathlib import Path

import msgspec

from hypergpu.chain.rpc.answers import Inclusion
from hypergpu.chain.rpc.chain import Reception
from hypergpu.chain.sent.acts import ActFile, act_of
from hypergpu.chain.sent.included import included
from hypergpu.chain.signer import Draft, contract_address
from hypergpu.cli.deployment.ground import Ground
from hypergpu.cli.deployment.offer import Offer, creation
from hypergpu.cli.deployment.options import LedgerOptions
from hypergpu.cli.deployment.record import Attempt, Record, RecordFile
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.ledger.typed import address_bytes

_ON_ITS_WAY = frozenset({Reception.TAKEN, Reception.KNOWN})
_WHAT = "deploy"
_AGAIN = "for another one beside it: --again"


class Deployed(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/deployed/1"):
    """A ledger that was made, or what making one would take. Amounts of money are text."""

    coordinator: Address
    chain_id: int
    address: Address
    """Where it lies, or would."""
    hash: str
    """Of the transaction; empty: nothing was sent."""
    block: int
    gas: int
    """That it took; before it is sent, its limit."""
    fee_wei: str
    """The most that its gas costs, by its offer."""
    final_after: int
    """Blocks on top of its own."""
    token: Address
    minimum_bond: str
    window_s: int
    unbonding_s: int
    arbiters: tuple[Address, ...]
    quorum: int
    treasury: Address
    guardian: Address


class Deployment:
    """One chain, one key, and what was signed for it before."""

    def __init__(self, ground: Ground, folder: Path) -> None:
        """Read nothing yet.

        Args:
            ground: The chain and the key.
            folder: The coordinator's.
        """
        self._chain, self._profile, self._signer = ground
        self._file = RecordFile(folder, self._profile.chain_id)
        self._acts = ActFile(folder, self._profile.chain_id)
        self.own = Address(self._signer.node_id)

    def refuse_second(self, options: LedgerOptions) -> None:
        """See that no other ledger was made or is on its way.

        Raises:
            HyperGPUError: FILE_PRESENT, one was or is.
            RpcError: the chain cannot be asked.
        """
        before = self._file.newest(self.own)
        if before is None:
            return
        name = before.newest.name
        if self._is_made(before):
            detail = (
                f"{self.own} has made the ledger {before.address} on chain"
                f" {self._profile.chain_id} already"
            )
            fix = f"use it: HYPERGPU_COORDINATOR_LEDGER_CONTRACT={before.address}; {_AGAIN}"
            raise HyperGPUError(Reason.FILE_PRESENT, detail, fix=fix)
        if self._chain.next_nonce(self._signer.address) > before.nonce:
            if self._place(before) is not None:
                return
            detail = f"the ledger {before.address} was signed for ({name}), and no block has it"
            fix = (
                f"run it again, the chain's RPC may be behind; if something else was sent, {_AGAIN}"
            )
            raise HyperGPUError(Reason.FILE_PRESENT, detail, fix=fix)
        if before.newest.options != options:
            detail = f"a ledger with other options is on its way: {before.address} ({name})"
            raise HyperGPUError(Reason.FILE_PRESENT, detail, fix="to take its place: --again")

    def foreseen(self, offer: Offer, options: LedgerOptions) -> Deployed:
        """What would be sent."""
        nonce = self._chain.next_nonce(self._signer.address)
        return self._told(self._address(nonce), offer, options)

    def made(self, offer: Offer, options: LedgerOptions) -> Deployed:
        """Make the ledger, and return once it is in a block.

        Raises:
            HyperGPUError: CHAIN_WRONG, the chain does not take it, or it failed; CHAIN_UNREACHABLE,
                no block has it yet; FILE_UNUSABLE, what is signed cannot be kept.
            RpcError: the chain cannot be asked.
        """
        record = self._signed(offer, options)
        newest = record.newest
        reception, words = self._acts.hand_over(newest.act, self._chain)
        if reception not in _ON_ITS_WAY and self._place(record) is None:
            detail = f"the chain does not take {newest.name}: {reception.value}: {words}"
            fix = "mend that, and run it again: it goes on with the same ledger"
            raise HyperGPUError(Reason.CHAIN_WRONG, detail, fix=fix)
        fix = "run it again: it goes on with the same ledger, and offers more where fees have risen"
        place = included(self._chain, self._profile, record.hashes, fix=fix)
        if not place.is_success:
            detail = f"0x{place.hash.hex()} failed in block {place.block_number}: nothing was made"
            raise HyperGPUError(Reason.CHAIN_WRONG, detail, fix="run it again with more gas money")
        (mined,) = [each for each in record.attempts if each.act.hash == place.hash]
        told = self._told(record.address, offer, mined.options)
        return msgspec.structs.replace(
            told,
            hash=mined.name,
            block=place.block_number,
            gas=place.gas_used,
            fee_wei=str(place.gas_used * mined.act.draft.max_fee_wei),
        )

    def _signed(self, offer: Offer, options: LedgerOptions) -> Record:
        """What is to be sent, kept: what is on its way with the same options, or a new signing."""
        nonce = self._chain.next_nonce(self._signer.address)
        before = self._file.newest(self.own)
        attempts: tuple[Attempt, ...] = ()
        if before is not None and before.nonce == nonce:
            newest, attempts = before.newest, before.attempts
            offered = newest.act.draft
            is_enough = offered.max_fee_wei * 2 > offer.max_fee_wei
            if newest.options == options and is_enough:
                return before
            offer = offer.above(offered.max_fee_wei, offered.tip_wei)
        draft = Draft(
            chain_id=self._profile.chain_id,
            nonce=nonce,
            to=b"",
            call=creation(options),
            gas=offer.gas,
            max_fee_wei=offer.max_fee_wei,
            tip_wei=offer.tip_wei,
        )
        attempt = Attempt(act_of(self._signer, draft, _WHAT), options)
        record = Record(
            coordinator=self.own,
            nonce=nonce,
            address=self._address(nonce),
            attempts=(*attempts, attempt),
        )
        self._file.keep(record)
        return record

    def _is_made(self, record: Record) -> bool:
        return bool(self._chain.code(address_bytes(record.address)))

    def _place(self, record: Record) -> Inclusion | None:
        places = self._chain.inclusions(record.hashes)
        return next((place for place in places if place is not None), None)

    def _address(self, nonce: int) -> Address:
        return Address(f"0x{contract_address(self._signer.address, nonce).hex()}")

    def _told(self, address: Address, offer: Offer, options: LedgerOptions) -> Deployed:
        return Deployed(
            coordinator=self.own,
            chain_id=self._profile.chain_id,
            address=address,
            hash="",
            block=0,
            gas=offer.gas,
            fee_wei=str(offer.most_wei),
            final_after=self._profile.depth,
            token=options.token,
            minimum_bond=str(options.minimum_bond),
            window_s=options.window_s,
            unbonding_s=options.unbonding_s,
            arbiters=options.arbiters,
            quorum=options.quorum,
            treasury=options.treasury,
            guardian=options.guardian,
        )
