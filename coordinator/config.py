"""Settings of the coordinator: flags first, then `HYPERGPU_COORDINATOR_*` in the environment."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Settings of one coordinator; the text under each is also the help of its flag."""

    model_config = SettingsConfigDict(
        env_prefix="HYPERGPU_COORDINATOR_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    data_dir: Path = Path.home() / ".local" / "share" / "hypergpu" / "coordinator"
    """Folder of journal, models, identity and tokens. One coordinator at a time uses it."""
    passphrase_file: Path | None = None
    """File with the passphrase of the key that signs receipts; '-' asks on the terminal. Without
    one a passphrase is made and kept beside the data folder."""
    listen: str = "0.0.0.0"  # noqa: S104  nodes dial in from other machines
    """Address that all listeners bind."""
    port: int = Field(default=7700, ge=0, le=65535)
    """Port of users, operators and joining nodes. 0 takes a free one."""
    node_port: int = Field(default=7701, ge=0, le=65535)
    """Port of nodes with a certificate. 0 takes a free one."""
    bulk_port: int = Field(default=7702, ge=0, le=65535)
    """Port of bulk bytes by HTTP. 0 takes a free one."""
    blobs: str = ""
    """Object store that carries bulk bytes in place of the bulk port: s3://BUCKET/PREFIX, with
    endpoint and keys as every S3 program takes them: docs/storage.md."""
    advertise: tuple[str, ...] = ()
    """Host that tokens and the certificate name; repeatable. Found out when there is none."""
    database_url: str = ""
    """SQLAlchemy URL of the journal; a SQLite file in the data folder when empty."""
    takeover: bool = False
    """One of several coordinators on a PostgreSQL: waits while another drives, goes on when that
    one is gone, and keeps what this takes in database and object store: docs/takeover.md."""
    tenure_ms: int = Field(default=5_000, ge=1_000)
    """With takeover: time after which a coordinator that is not heard of is taken over from."""
    engine: str = ""
    """Who folds large models and evaluates: local (a pool of processes), ray (one of its own on
    this machine), ray://HOST:10001 (a cluster); the coordinator itself when empty."""
    engine_parameters_least: int = Field(default=8 << 20, ge=0)
    """Models of fewer parameters are folded by the coordinator's threads, whatever the engine."""
    job_turn_ms: int = Field(default=60_000, ge=1_000)
    """For how long a job keeps the least nodes it needs while others wait for nodes."""
    evaluators: int = Field(default=0, ge=0)
    """Evaluator processes at once, each for one job. 0: as many as fit into three quarters of the
    memory, one a processor at most and two at least."""
    evaluator_memory_bytes: int = Field(default=0, ge=0)
    """Most memory of an evaluator. 0: three eighths of this machine's; where that is beyond 16 GiB,
    as much, or an eighth if that is more."""
    evaluator_limit_s: int = Field(default=600, ge=1)
    """Most seconds of a first model, an evaluation or a gradient: a job over it goes on without."""
    evaluator_spares: int = Field(default=1, ge=0)
    """Evaluators that are ready for the next job, where there is memory for one."""
    evaluator_sandbox: Literal["auto", "bwrap", "landlock", "off"] = "auto"
    """The sandbox of evaluators; auto takes the first one that starts here."""
    metrics_listen: str = ""
    """HOST:PORT with /metrics for Prometheus: open on loopback, else TLS and an operator's token.
    None when empty."""
    events: str = ""
    """Redis stream that gets receipts and rounds: redis://HOST:6379/0?stream=NAME&maxlen=N. May
    hold a password: better by the environment."""
    plaintext: bool = False
    """No TLS; only on loopback."""
    disk_quota_bytes: int = Field(default=0, ge=0)
    """Most bytes of blobs; 0: no limit but the disk."""
    line_mbit_s: int = Field(default=0, ge=0)
    """Rate in Mbit/s of this machine's line towards it: uploads that would crowd it wait for each
    other. 0: not known, no upload waits."""
    relay_percent: int = Field(default=50, ge=1, le=100)
    """Share of line_mbit_s that hidden states between stages of served models may take: they wait
    for their turn, and all else goes first. Nothing waits where line_mbit_s is 0."""
    heartbeat_interval_ms: int = Field(default=5_000, ge=10)
    """How often nodes are told to say that they live."""
    lost_after_ms: int = Field(default=15_000, ge=100)
    """A node not heard of for this long is lost."""
    reconnect_grace_ms: int = Field(default=30_000, ge=0)
    """After a start, a node that was working has this much longer to dial in: as long as nodes wait
    at most before they dial again."""
    read_timeout_ms: int = Field(default=10_000, ge=100)
    """A node's stream that begins with nothing for this long is closed."""
    drain_timeout_ms: int = Field(default=20_000, ge=0)
    """How long SIGTERM waits for calls in flight."""
