"""What was signed to make ledgers, kept before it is sent: a second run makes no second one."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from hypergpu.chain.sent.acts import Act
from hypergpu.cli.deployment.options import LedgerOptions
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably
from hypergpu.ids import Address

_FOLDER = "chain"


class Attempt(msgspec.Struct, frozen=True):
    """One signing. All of a record have its nonce: a block takes one of them."""

    act: Act
    options: LedgerOptions

    @property
    def name(self) -> str:
        """Its hash, as people have it."""
        return f"0x{self.act.hash.hex()}"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One ledger that was signed for."""

    coordinator: Address
    nonce: int
    address: Address
    """Where it lies once a block has it: this follows from the key and the nonce."""
    attempts: tuple[Attempt, ...]

    @property
    def newest(self) -> Attempt:
        """The newest signing."""
        return self.attempts[-1]

    @property
    def hashes(self) -> Sequence[bytes]:
        """Of every signing."""
        return [attempt.act.hash for attempt in self.attempts]


class RecordFile:
    """The ledgers that were signed for on one chain, the newest last."""

    def __init__(self, data_dir: Path, chain_id: int) -> None:
        """Read nothing yet.

        Args:
            data_dir: The coordinator's folder.
            chain_id: Of the chain.
        """
        self.path = data_dir / _FOLDER / f"deployed-{chain_id}.json"

    def newest(self, coordinator: Address) -> Record | None:
        """The newest of a key.

        Raises:
            HyperGPUError: FILE_UNUSABLE, the file is damaged or cannot be read.
        """
        own = [record for record in self._records() if record.coordinator == coordinator]
        return own[-1] if own else None

    def keep(self, record: Record) -> None:
        """Keep a record; it takes the place of an earlier one of the same key and nonce.

        Raises:
            HyperGPUError: FILE_UNUSABLE, it cannot be written.
        """
        others = [
            each
            for each in self._records()
            if (each.coordinator, each.nonce) != (record.coordinator, record.nonce)
        ]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(self.path, msgspec.json.encode([*others, record]))
        except OSError as broken:
            detail = f"{self.path} cannot be written: {broken.strerror}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken

    def _records(self) -> list[Record]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=list[Record])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError, UnicodeError) as broken:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{self.path}: {broken}") from broken
