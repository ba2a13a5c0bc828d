"""The files in which the API keeps keys and batches."""

import sqlite3
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


def rows_of(table: PrivateTable) -> list[tuple[int]]:
    with table.open() as connection:
        return connection.execute("SELECT number FROM texts").fetchall()


def file_of_the_version_before(path: Path) -> sqlite3.Connection:
    """A table with one row in the journal mode of before, and the connection that wrote it."""
    older_process = sqlite3.connect(path)
    older_process.execute("CREATE TABLE texts (number INTEGER PRIMARY KEY, text BLOB)")
    older_process.execute("INSERT INTO texts VALUES (1, x'00')")
    older_process.commit()
    return older_process


def test_a_file_that_the_version_before_is_writing_is_opened(path: Path) -> None:
    older_process = file_of_the_version_before(path)
    older_process.execute("BEGIN IMMEDIATE")
    assert rows_of(PrivateTable(path, "move it away")) == [(1,)]
    older_process.close()
    assert rows_of(PrivateTable(path, "move it away")) == [(1,)]


def test_nobody_is_told_to_move_a_file_away_that_another_process_holds(path: Path) -> None:
    older_process = file_of_the_version_before(path)
    older_process.execute("BEGIN EXCLUSIVE")
    with pytest.raises(HyperGPUError, match="locked") as refusal:
        rows_of(PrivateTable(path, "move it away", patience_s=0.0))
    assert "move it away" not in str(refusal.value)
    assert "try again" in str(refusal.value)
    older_process.close()


def test_the_fix_of_a_file_that_is_no_table_is_its_owners(path: Path) -> None:
    path.write_bytes(b"no table" * 1000)
    with pytest.raises(HyperGPUError, match="move it away"):
        rows_of(PrivateTable(path, "move it away"))
