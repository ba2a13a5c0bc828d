"""What the daemon offers the coordinator: its worker's capabilities within its owner's limits."""

from pathlib import Path

import msgspec
import psutil
import structlog

from gpu_node.config import NodeSettings
from gpu_node.core.limits import OwnerLimits
from gpu_node.shell.link.calls import capabilities_message
from gpu_node.shell.owner.gate import OwnerGate
from gpu_node.shell.worker.protocol import WorkerCapabilities
from hypergpu.device_shares import WHOLE_DEVICE_PERMILLE
from hypergpu.serving.serve_request import ENGINE_VERSION, SERVER_KIND
from hypergpu.v1 import node_pb2

log = structlog.get_logger()


def warn_of_hidden_gpu(capabilities: WorkerCapabilities, limits: OwnerLimits) -> None:
    """Log a GPU that the machine has and the worker does not see."""
    is_hidden = capabilities.device == "cpu" and limits.gpu != "none"
    if is_hidden and capabilities.kind == "torch" and Path("/dev/nvidiactl").exists():
        fix = "try HYPERGPU_NODE_SANDBOX=landlock, or off: docs/node.md"
        log.warning("the worker uses no GPU, though there is one", fix=fix)


class CapabilityOffer:
    """What the daemon offers.

    Args:
        name: What the owner calls the machine.
        settings: The daemon's.
        limits: The owner's.
        gate: Tells which workloads the owner allows.
        sandbox: Of the worker, for people.
    """

    def __init__(
        self,
        name: str,
        settings: NodeSettings,
        limits: OwnerLimits,
        gate: OwnerGate,
        sandbox: str,
    ) -> None:
        self._name = name
        self._settings = settings
        self._limits = limits
        self._gate = gate
        self._sandbox = sandbox

    def message(self, capabilities: WorkerCapabilities) -> node_pb2.Capabilities:
        """The offer on the wire, of which the gate takes note."""
        self._gate.take_capabilities(capabilities)
        has_server = self._limits.server is not None
        server_kinds = {SERVER_KIND: ENGINE_VERSION} if has_server else {}
        allowed_workloads = {
            name: version
            for name, version in (capabilities.workloads | server_kinds).items()
            if self._gate.refusal_of_workload(name) is None
        }
        capabilities = msgspec.structs.replace(capabilities, workloads=allowed_workloads)
        message = capabilities_message(capabilities, self._name, self._caps)
        message.sandbox = self._sandbox
        message.labels.update(self._limits.labels)
        message.processors = psutil.cpu_count() or 1
        message.machine_memory_bytes = psutil.virtual_memory().total
        message.data_names.extend(sorted(self._limits.data))
        message.share_permille = WHOLE_DEVICE_PERMILLE // self._limits.shares
        return message

    @property
    def _caps(self) -> node_pb2.Caps:
        settings, limits = self._settings, self._limits
        return node_pb2.Caps(
            worker_threads=settings.worker_threads,
            worker_memory_bytes=settings.worker_memory_bytes,
            cache_bytes=settings.cache_bytes,
            step_floor_ms=settings.worker_step_floor_ms,
            disk_bytes=limits.disk_bytes,
            upload_bits_per_s=limits.upload_bits_per_s,
            download_bits_per_s=limits.download_bits_per_s,
        )
