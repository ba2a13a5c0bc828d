"""The files in which the API keeps keys and batches."""

import stat
import threading
from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.user.serving.private_table import PrivateTable

SECRET = b"a prompt that nobody else reads"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.sqlite"


@pytest.fixture
def table(path: Path) -> PrivateTable:
    table = PrivateTable(path, "move it away")
    with table.open() as connection:
        connection.execute("CREATE TABLE texts (number INTEGER PRIMARY KEY, text BLOB)")
    return table


def test_what_was_deleted_is_in_no_file(table: PrivateTable, path: Path) -> None:
    with table.open() as connection:
        connection.execute("INSERT INTO texts VALUES (1, ?)", (SECRET,))
    assert any(SECRET in each.read_bytes() for each in path.parent.iterdir())
    with table.open() as connection:
        connection.execute("DELETE FROM texts")
    table.forget_deleted()
    assert not any(SECRET in each.read_bytes() for each in path.parent.iterdir())


def test_only_its_user_reads_it_and_its_log(table: PrivateTable, path: Path) -> None:
    with table.open() as connection:
        connection.execute("INSERT INTO texts VALUES (1, ?)", (SECRET,))
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    assert len(modes) == 3
    assert set(modes.values()) == {0o600}


def test_threads_and_another_connection_count_together(table: PrivateTable, path: Path) -> None:
    other_table = PrivateTable(path, "move it away")

    def add(to: PrivateTable) -> None:
        for _ in range(50):
            with to.open() as connection:
                connection.execute("INSERT INTO texts (text) VALUES (?)", (SECRET,))

    threads = [threading.Thread(target=add, args=(to,)) for to in (table, table, other_table)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with table.open() as connection:
        assert connection.execute("SELECT COUNT(*) FROM texts").fetchone() == (150,)


def test_a_broken_statement_changes_nothing_and_is_told(table: PrivateTable) -> None:
    def write_nowhere() -> None:
        with table.open() as connection:
            connection.execute("INSERT INTO texts VALUES (1, ?)", (SECRET,))
            connection.execute("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(HyperGPUError, match="move it away"):
        write_nowhere()
    with table.open() as connection:
        assert connection.execute("SELECT COUNT(*) FROM texts").fetchone() == (0,)
