"""What a run of the settling process earns, and how it is told to go about it."""

import msgspec

from coordinator.core.settlement.sealing import Metering
from hypergpu.ids import JobId
from hypergpu.keys.keccak import keccak
from hypergpu.signature import IdentityKey

JOB = JobId("job-00000000000a")
UNIT_PRICE = 1_000
ESCROW = 10**15
SAMPLES = 320
QUALITY_BPS = 9_000
STAKED = "staked"
"""A file in the plan's folder: the nodes have their stakes."""
COORDINATOR = IdentityKey(keccak(b"a benchmark's coordinator"))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run, the same for every start of its process."""

    folder: str
    url: str
    nodes: int
    receipts_each: int
    """Of each node, in all."""
    rounds_per_epoch: int
    """Receipts of each node in one epoch."""
    round_ms: int
    """Between two rounds, in each of which every node earns one receipt; 0: no waiting."""
    metering: Metering = Metering.BATCHED
    receipts_per_batch: int = 5_000
    has_stakes: bool = False
    """Nodes stake before the first round, so that they are paid inside the window."""

    @property
    def receipts(self) -> int:
        """Of all nodes."""
        return self.nodes * self.receipts_each

    @property
    def owed(self) -> int:
        """What all receipts earn, in the token's smallest units."""
        return self.receipts * SAMPLES * QUALITY_BPS * UNIT_PRICE // 1_000_000

    def node_keys(self) -> list[IdentityKey]:
        """The nodes' keys; the same each time."""
        return [IdentityKey(keccak(b"a benchmark's node %d" % n)) for n in range(self.nodes)]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What the process says of itself, a line of JSON at a time."""

    kept: int
    """Receipts in its journal."""
    contract: str = ""
    unpaid_epochs: int = 0
    waiting: int = 0
    is_sealed: bool = False
    """Every receipt is in a transaction."""
    deferred: int = 0
    """Shares that wait for their window."""
    is_done: bool = False
    halted: str = ""
