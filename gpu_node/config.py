"""Settings of a node: flags first, then `HYPERGPU_NODE_*` in the environment, then `[settings]` in
the node.toml of its folder.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class NodeSettings(BaseSettings):
    """Settings of one node. Its coordinator is named in its state folder, by the join."""

    model_config = SettingsConfigDict(env_prefix="HYPERGPU_NODE_", frozen=True, extra="forbid")

    state_dir: Path = Path.home() / ".local" / "share" / "hypergpu" / "node"
    """Identity, certificate, end states and cached blobs. One daemon at a time uses it."""
    passphrase_file: Path | None = None
    """Holds the identity's passphrase; ``-``: ask on the terminal. Without one a passphrase is made
    and kept beside the state folder.
    """
    name: str = ""
    """Name shown with the node's id. Empty: its earlier name, or the machine's."""
    worker: Literal["auto", "torch", "numpy", "null"] = "auto"
    """Kind of worker. ``auto``: torch where it is installed, else numpy."""
    worker_python: str | None = None
    """Python that runs the worker, by its path. None: the daemon's own. ``auto``: that one where
    it has torch, else one of an environment beside the state folder, which is made with torch.
    """
    worker_module: str = "gpu_node.shell.worker"
    """Python module that runs as the worker. Another one serves tests and simulated attackers."""
    sandbox: Literal["auto", "bwrap", "landlock", "off"] = "auto"
    """Sandbox of the worker. ``auto``: bubblewrap where it starts, else landlock, else none."""
    devices: str | None = None
    """Devices with commas, each of which gets a node: a GPU's index or UUID, or ``cpu``. None: all
    CUDA devices that the owner allows, and the processor where there is none.
    """
    worker_threads: int = Field(default=0, ge=0)
    """Threads of the worker; 0: its default, one."""
    worker_memory_bytes: int = Field(default=0, ge=0)
    """Memory the worker may take; 0: no cap."""
    worker_step_floor_ms: int = Field(default=0, ge=0)
    """Least time of an inner step or checksum item: lets a fast machine play a slow one."""
    worker_spares: int = Field(default=1, ge=0, le=1)
    """Workers in reserve, which let the next job begin at once; 0: none. There is none either
    where memory is short.
    """
    cache_bytes: int = Field(default=20 << 30, ge=0)
    """Downloaded models and datasets may take this much beyond what the work at hand needs."""
    drain_limit_ms: int = Field(default=25_000, ge=0)
    """Time in which training and uploading may finish after the first SIGTERM."""
    first_progress_limit_ms: int = Field(default=600_000, ge=1_000)
    """Time limit of a training's first progress and of a worker's start; then the worker is ended
    and started again.
    """
    progress_limit_ms: int = Field(default=120_000, ge=2_000)
    """Time limit of later progress; 20 times the slowest inner step where that is longer."""
    reconnect_cap_ms: int = Field(default=30_000, ge=200)
    """The longest wait before dialling again."""
    call_timeout_ms: int = Field(default=10_000, ge=100)
    """Time limit of a small call, and of silence in a transfer beyond the time of its pieces."""
    congestion_control: Literal["system", "bbr"] = "system"
    """``bbr``: for the route to the coordinator alone, where this process may set routes."""
    probe_interval_ms: int = Field(default=2_000, ge=100)
    """Between two round trips measured while the node takes part in a job; when it does not, its
    heartbeats measure them."""
    probe_train_interval_ms: int = Field(default=10_000, ge=1_000)
    """Between two trains of datagrams that measure losses; six times as long on an idle one."""
    page: str | None = None
    """Address of the coordinator's page, as its operator gave it: `hypergpu status` links to it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
