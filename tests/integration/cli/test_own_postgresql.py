"""A PostgreSQL of a demo's own: it takes its password only, and leaves nothing."""

from pathlib import Path

import psycopg
import pytest

from benchmarks.ours.demo.postgresql import PostgresServer

pytestmark = pytest.mark.needs("postgres server")


def test_it_takes_its_own_password_only_and_ends_with_its_data(tmp_path: Path) -> None:
    folder, log = tmp_path / "postgresql", tmp_path / "postgresql.log"
    with PostgresServer(folder, log) as server:
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        guessed_url = server.url.replace(server.url.split(":")[2].partition("@")[0], "guess")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(guessed_url)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(server.url)
    assert list(folder.iterdir()) == []
    assert "database system is shut down" in log.read_text("utf-8")
