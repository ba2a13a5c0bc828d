"""Settings of the dashboard: flags first, then `HYPERGPU_DASHBOARD_*` in the environment."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class DashboardSettings(BaseSettings):
    """Settings of one dashboard; the text under each is also the help of its flag."""

    model_config = SettingsConfigDict(
        env_prefix="HYPERGPU_DASHBOARD_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    data_dir: Path = Path.home() / ".local" / "share" / "hypergpu" / "dashboard"
    """Folder of history, sessions and uploads."""
    coordinator: str = ""
    """Address of the coordinator, host:port; the token's own when empty."""
    token_file: str = ""
    """File with the token that the printed link acts with; the user's settings when empty."""
    coordinator_data_dir: Path | None = None
    """Folder of a coordinator on this machine, whose free space is watched."""
    listen: str = "127.0.0.1"
    """Address to bind; only this machine reaches the page by default."""
    port: int = Field(default=7780, ge=0, le=65535)
    """Port of page, feed and API. 0 takes a free one."""
    takes_any_port: bool = False
    """Take a free port when the stated one is in use."""
    host: tuple[str, ...] = ()
    """A name that browsers reach the page by, besides this machine's loopback names; repeatable."""
    database_url: str = ""
    """SQLAlchemy URL of the history; a SQLite file in the data folder when empty."""
    webhook: tuple[str, ...] = ()
    """http or https address that is sent alerts when they begin and end; repeatable."""
    comparisons: Path | None = None
    """Folder with results of `hypergpu compare`; the user's own, with all of them, when empty."""
    upload_bytes: int = Field(default=500_000_000, ge=1)
    """Most bytes of an uploaded data set."""
    recording: Path | None = None
    """Recorded frames that are shown in place of a coordinator."""
