"""What an operator's commands sign with the coordinator's key, kept before it is sent.

No journal is open then. The coordinator finds it here at its next start and takes it into its
outbox, so that it knows its own nonces from those that somebody else has used.
"""

from pathlib import Path

import msgspec

from hypergpu.chain.rpc.chain import EvmChain, Reception, Sent
from hypergpu.chain.signer import Draft, Signed, Signer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably
from hypergpu.ids import Address

_FOLDER = "chain"
_GONE = frozenset(
    {Reception.FEE_TOO_LOW, Reception.UNFUNDED, Reception.POOL_FULL, Reception.REFUSED}
)
"""The chain has not got it. A used nonce may be used by it."""


class Act(msgspec.Struct, frozen=True):
    """One signing. Several may have one nonce: a block takes one of them."""

    owner: Address
    what: str
    """It does, such as ``postBond``."""
    draft: Draft
    hash: bytes
    raw: bytes

    @property
    def signed(self) -> Signed:
        """As it is sent."""
        return Signed(self.hash, self.raw)


class ActFile:
    """The acts on one chain, as they were signed. Read and written under the key's lock."""

    def __init__(self, data_dir: Path, chain_id: int) -> None:
        """Read nothing yet.

        Args:
            data_dir: The coordinator's folder.
            chain_id: Of the chain.
        """
        self.path = data_dir / _FOLDER / f"acts-{chain_id}.json"

    def of(self, owner: Address) -> tuple[Act, ...]:
        """Those of a key.

        Raises:
            HyperGPUError: FILE_UNUSABLE, the file is damaged or cannot be read.
        """
        return tuple(act for act in self._acts() if act.owner == owner)

    def hand_over(self, act: Act, chain: EvmChain) -> Sent:
        """Keep an act and send it. A new one that the chain does not take is forgotten again.

        Raises:
            HyperGPUError: FILE_UNUSABLE, it cannot be kept: nothing was sent.
            RpcError: nobody knows whether the chain has it: it goes again at the next start.
        """
        before = self._acts()
        if act not in before:
            self._write([*before, act])
        (sent,) = chain.send([act.signed])
        if sent.reception in _GONE:
            self._write(before)
        return sent

    def _acts(self) -> list[Act]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=list[Act])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError, UnicodeError) as broken:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{self.path}: {broken}") from broken

    def _write(self, acts: list[Act]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(self.path, msgspec.json.encode(acts))
        except OSError as broken:
            detail = f"{self.path} cannot be written: {broken.strerror}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken


def act_of(signer: Signer, draft: Draft, what: str) -> Act:
    """Sign an act."""
    signed = signer.sign(draft)
    return Act(Address(signer.node_id), what, draft, signed.hash, signed.raw)
