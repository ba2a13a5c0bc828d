"""What nodes say, as plain values. What they say of themselves is shown and relied on nowhere."""

from collections.abc import Mapping

import msgspec

from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.units import Bytes


class Capabilities(msgspec.Struct, frozen=True):
    """What a node can do, as it says."""

    device: str = ""
    device_name: str = ""
    memory_bytes: int = 0
    worker: str = ""
    workloads: Mapping[str, int] = {}
    name: str = ""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """An update that a node wants to send, as its header has it but for where the bytes begin."""

    job_id: JobId
    round: int
    node: NodeId
    lease: int
    nonce: int
    digest: Digest
    size_bytes: Bytes
    signature: bytes


class Advance(msgspec.Struct, frozen=True):
    """How far a participant is, for people. Only the newest is kept."""

    job_id: JobId
    round: int
    lease: int
    steps_done: int
    steps_total: int
    loss: float
