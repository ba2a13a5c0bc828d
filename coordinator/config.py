"""Settings of the coordinator: flags first, then `HYPERGPU_COORDINATOR_*` in the environment."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """How one coordinator runs."""

    model_config = SettingsConfigDict(
        env_prefix="HYPERGPU_COORDINATOR_", frozen=True, extra="forbid"
    )

    data_dir: Path = Path.home() / ".local" / "share" / "hypergpu" / "coordinator"
    """Journal, blobs, identity and tokens. One coordinator at a time uses it."""
    passphrase_file: Path | None = None
    """Holds the passphrase of the key that signs receipts; ``-``: ask on the terminal. Without one
    a passphrase is made and kept beside ``data_dir``.
    """
    listen: str = "0.0.0.0"  # noqa: S104  nodes dial in from other machines
    """Address that both listeners bind."""
    port: int = Field(default=7700, ge=0, le=65535)
    """Users, operators and joining nodes. 0 takes a free one."""
    node_port: int = Field(default=7701, ge=0, le=65535)
    """Nodes with a certificate. 0 takes a free one."""
    advertise: tuple[str, ...] = ()
    """Addresses that tokens and the certificate name; found out when empty."""
    database_url: str = ""
    """SQLAlchemy URL of the journal; a SQLite file in ``data_dir`` when empty."""
    plaintext: bool = False
    """No TLS; only on loopback."""
    disk_quota_bytes: int = Field(default=0, ge=0)
    """Blobs may take this much; 0: what the disk has."""
    line_mbit_s: int = Field(default=0, ge=0)
    """What this machine's line carries towards it, in Mbit/s: where nodes' uploads would crowd it,
    plans let some wait. 0: not known, nobody waits."""
    heartbeat_interval_ms: int = Field(default=5_000, ge=10)
    """How often nodes are told to say that they live."""
    lost_after_ms: int = Field(default=15_000, ge=100)
    """A node not heard of for this long is lost."""
    reconnect_grace_ms: int = Field(default=30_000, ge=0)
    """After a start, a node that was working has this much longer to dial in: as long as nodes wait
    at most before they dial again."""
    read_timeout_ms: int = Field(default=10_000, ge=100)
    """A client stream that sends nothing for this long is closed; bulk has the time beside it that
    a piece takes."""
    drain_timeout_ms: int = Field(default=20_000, ge=0)
    """How long SIGTERM waits for calls in flight."""
