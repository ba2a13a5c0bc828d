"""What follows from a node's settings and its owner's limits, which outweigh them."""

from gpu_node.config import NodeSettings
from gpu_node.core.limits import OwnerLimits
from gpu_node.core.session_state import StallTimeouts
from gpu_node.shell.link.probing import ProbeIntervals
from gpu_node.shell.owner.limits_file import gpu_environment
from gpu_node.shell.worker.protocol import SHARES
from gpu_node.shell.worker_host.supervision import worker_caps
from hypergpu.units import Milliseconds


def limited_settings(settings: NodeSettings, limits: OwnerLimits) -> NodeSettings:
    """The settings with the owner's limits, which outweigh them."""
    changes = {
        "worker_threads": limits.threads or settings.worker_threads,
        "worker_memory_bytes": limits.memory_bytes or settings.worker_memory_bytes,
    }
    if limits.disk_bytes:
        changes["cache_bytes"] = min(settings.cache_bytes, limits.disk_bytes)
    return settings.model_copy(update=changes)


def worker_variables(settings: NodeSettings, limits: OwnerLimits) -> dict[str, str]:
    """What the worker's environment tells it of its limits."""
    caps = worker_caps(
        settings.worker_threads, settings.worker_memory_bytes, settings.worker_step_floor_ms
    )
    if limits.shares > 1:
        caps[SHARES] = str(limits.shares)
    return caps | gpu_environment(limits)


def stall_timeouts(settings: NodeSettings) -> StallTimeouts:
    """How long a worker may show no progress."""
    return StallTimeouts(
        first_ms=Milliseconds(settings.first_progress_limit_ms),
        later_ms=Milliseconds(settings.progress_limit_ms),
    )


def probe_intervals(settings: NodeSettings) -> ProbeIntervals:
    """How often the line is measured."""
    train_s = settings.probe_train_interval_ms / 1000
    return ProbeIntervals(
        round_trip_s=settings.probe_interval_ms / 1000, train_s=train_s, idle_train_s=train_s * 6
    )
