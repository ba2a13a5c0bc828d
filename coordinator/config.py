"""Settings of the coordinator: flags first, then `HYPERGPU_COORDINATOR_*` in the environment."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _ledger(given: str) -> str:
    try:
        from hypergpu.chain.addresses import address_of
    except ModuleNotFoundError:
        # Of the extra without which nothing is settled, as the start says.
        return given
    return address_of(given, "HYPERGPU_COORDINATOR_LEDGER_CONTRACT") if given else ""


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
    chain: str = "none"
    """What settles the jobs that pay: a chain by name, by its RPC's address or by a profile's file,
    ``anvil`` for one on this machine that is started with the coordinator; ``none``: receipts are
    signed and kept."""
    chain_url: str = ""
    """The chain's RPC; its profile's own when empty, and of ``anvil`` the one that is started."""
    chain_port: int = Field(default=0, ge=0, le=65535)
    """Of the Anvil that is started; 0 takes a free one."""
    ledger_contract: Annotated[str, BeforeValidator(_ledger)] = ""
    """Address of the ledger; on ``anvil`` one is deployed when empty."""
    metering: Literal["batched", "packed", "each"] = "batched"
    """How receipts reach the chain: their sums and the root of their tree, every receipt in the
    call data of one transaction for many, or in a transaction of its own."""
    retry_failed: bool = False
    """At this start, give up transactions that failed on the chain, or whose nonce somebody else
    used, and sign afresh what they were for: once the cause is mended, settling goes on."""
    drain_timeout_ms: int = Field(default=20_000, ge=0)
    """How long SIGTERM waits for calls in flight."""
