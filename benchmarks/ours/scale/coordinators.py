"""Coordinators that may take over from one another: a PostgreSQL, of which `.ci/with_postgres.py`
tells, a bucket, a passphrase.
"""

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from benchmarks.ours.cluster import LOOPBACK, ONE_THREAD, BenchmarkError
from coordinator.shell.store.journal.engines import journal_url
from hypergpu.user.cluster.cluster import Listen, coordinator_command
from hypergpu.user.cluster.processes import kill_group, start
from hypergpu.user.cluster.s3_server import BUCKET
from hypergpu.wire.free_ports import free_ports

_POSTGRES = "HYPERGPU_TEST_POSTGRES_URL"
HEARTBEAT_MS = "2000"


class PairedCoordinator(NamedTuple):
    """A coordinator's process, which drives or stands by."""

    folder: Path
    child: "subprocess.Popen[str]"


def start_coordinator(
    folder: Path, environment: dict[str, str], owner: ExitStack
) -> PairedCoordinator:
    """Start a coordinator on ports that it keeps, and do not wait for it."""
    folder.mkdir()
    port, node_port = free_ports(2)
    at = Listen(
        data_dir=folder / "coordinator",
        listen=LOOPBACK,
        port=port,
        node_port=node_port,
        bulk_port=0,
        blobs=f"s3://{BUCKET}/scale",
    )
    log = folder / "coordinator.log"
    child = start(coordinator_command(at), log=log, is_read=True, environment=environment)
    owner.callback(kill_group, child)
    return PairedCoordinator(folder, child)


def takeover_settings(folder: Path, url: str) -> dict[str, str]:
    """Return the variables that coordinators on one database share."""
    passphrase = folder / "passphrase"
    passphrase.write_text("two words\n")
    passphrase.chmod(0o600)
    return {
        **ONE_THREAD,
        "HYPERGPU_COORDINATOR_TAKEOVER": "1",
        "HYPERGPU_COORDINATOR_DATABASE_URL": url,
        "HYPERGPU_COORDINATOR_PASSPHRASE_FILE": str(passphrase),
        "HYPERGPU_COORDINATOR_HEARTBEAT_INTERVAL_MS": HEARTBEAT_MS,
    }


@contextmanager
def empty_schema() -> Iterator[str]:
    """The URL of an empty schema, gone afterwards."""
    server = os.environ.get(_POSTGRES, "")
    if not server:
        raise BenchmarkError(f"no PostgreSQL listens here: install one, or set {_POSTGRES}")
    name = f"hypergpu_benchmark_{secrets.token_hex(6)}"
    engine = create_engine(journal_url(server))
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    url = make_url(server).update_query_dict({"options": f"-csearch_path={name}"})
    try:
        yield url.render_as_string(hide_password=False)
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP SCHEMA {name} CASCADE"))
        engine.dispose()
