"""Settings of a gateway: flags first, then `HYPERGPU_GATEWAY_*` in the environment."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class GatewaySettings(BaseSettings):
    """Settings of one gateway; the text under each is also the help of its flag."""

    model_config = SettingsConfigDict(
        env_prefix="HYPERGPU_GATEWAY_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    coordinator: tuple[str, ...] = ()
    """Main address of a coordinator, host:port; repeatable: they are tried in turn. The token's own
    when there is none."""
    listen: str = "0.0.0.0"  # noqa: S104  nodes dial in from other machines
    """Address that all listeners bind."""
    port: int = Field(default=7700, ge=0, le=65535)
    """Port of joining nodes. 0 takes a free one."""
    node_port: int = Field(default=7701, ge=0, le=65535)
    """Port of nodes with a certificate. 0 takes a free one."""
    bulk_port: int = Field(default=7702, ge=0, le=65535)
    """Port whose bytes go to the coordinator's bulk port. 0 takes a free one."""
    advertise: tuple[str, ...] = ()
    """Host that nodes dial, as the certificate names it; repeatable. Found out when there is none.
    """
    streams_per_s: int = Field(default=200, ge=1)
    """Nodes whose streams it opens each second; others are told when to come again."""
    metrics_listen: str = ""
    """Loopback HOST:PORT with /metrics for Prometheus; none when empty."""
    drain_timeout_ms: int = Field(default=5_000, ge=0)
    """How long SIGTERM waits for calls in flight."""
