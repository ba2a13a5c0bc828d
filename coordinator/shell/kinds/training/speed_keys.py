"""Keys by which speeds of nodes are remembered and compared: what a job's steps are, and where they
are taken.
"""

from collections.abc import Iterable, Mapping

import msgspec
from blake3 import blake3

from coordinator.core.network.known_speed import SpeedSource
from coordinator.core.training.job.state import Job
from coordinator.shell.nodes.control_stream import ControlStream
from coordinator.shell.nodes.fleet_speeds import device_key
from hypergpu.ids import NodeId


def workload_key(job: Job) -> str:
    """Digest of all that the time of a job's step follows from, but for the machine."""
    spec = job.spec
    parts = (
        spec.workload,
        job.workload_version,
        sorted(spec.options.items()),
        job.layout,
        spec.training.batch_size,
        spec.inner.optimizer,
    )
    return blake3(msgspec.json.encode(parts)).hexdigest(16)


def rate_key(job: Job) -> str:
    """Key of the nodes whose speeds are compared: those that train one workload and layout."""
    return f"{job.spec.workload}/{job.layout[:16]}"


def speed_sources(
    job: Job, streams: Mapping[NodeId, ControlStream], nodes: Iterable[NodeId]
) -> dict[NodeId, SpeedSource]:
    """What speeds of these nodes in a job are of; those that are not connected are left out."""
    workload = workload_key(job)
    return {
        node: SpeedSource(workload, device_key(streams[node])) for node in nodes if node in streams
    }
