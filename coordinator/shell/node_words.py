"""What nodes say of themselves, as plain values: shown in tables, relied on nowhere."""

from collections.abc import Mapping

import msgspec

from hypergpu.ids import JobId


class Capabilities(msgspec.Struct, frozen=True):
    """What a node can do, as it says."""

    device: str = ""
    device_name: str = ""
    memory_bytes: int = 0
    worker: str = ""
    workloads: Mapping[str, int] = {}
    name: str = ""


class Advance(msgspec.Struct, frozen=True):
    """How far a participant is, for people. Only the newest is kept."""

    job_id: JobId
    round: int
    lease: int
    steps_done: int
    steps_total: int
    loss: float
