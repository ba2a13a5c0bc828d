"""Batches and their files, as this machine keeps them: in a folder of the user's own.

Texts of prompts and answers lie in it, so that the folder and its files are its user's alone, and
are deleted after `KEPT_S`. Each line's answer is kept as it comes: whoever goes on with a batch
answers only the lines that have none.
"""

import fcntl
import os
import secrets
import sqlite3
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.serving.batch_forms import RequestBatch, RequestCounts, StoredFile
from hypergpu.user.serving.private_table import PrivateTable

KEPT_S = 7 * 24 * 3600
"""How long files are kept after they were sent or written."""
_PRIVATE_FOLDER, _PRIVATE = 0o700, 0o600
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, key_id TEXT NOT NULL, document BLOB NOT NULL, expires_at INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, key_id TEXT NOT NULL, document BLOB NOT NULL, has_ended INTEGER NOT NULL,
    expires_at INTEGER NOT NULL, cancelled_at INTEGER
);
CREATE TABLE IF NOT EXISTS answers (
    batch TEXT NOT NULL, line INTEGER NOT NULL, answer BLOB NOT NULL, is_error INTEGER NOT NULL,
    PRIMARY KEY (batch, line)
);
"""
_BATCHES = "SELECT key_id, document, cancelled_at FROM batches"


class BatchStore:
    """The batches in one folder, which any number of processes may open."""

    def __init__(self, folder: Path) -> None:
        """Open the folder, which is made where it is missing.

        Raises:
            HyperGPUError: FILE_UNUSABLE.
        """
        self._folder = folder
        self._mark: BinaryIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=_PRIVATE_FOLDER)
            folder.chmod(_PRIVATE_FOLDER)
        except OSError as error:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{folder}: {error.strerror}") from error
        fix = "move its folder away: batches and their files are then forgotten"
        self._table = PrivateTable(folder / "batches.sqlite", fix)
        with self._table.open() as table:
            table.executescript(_TABLES)

    def claim(self) -> bool:
        """Be the one process that answers batches, as long as it lives. False: another one is."""
        if self._mark is not None:
            return True
        mark = (self._folder / "answering").open("ab")
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mark.close()
            return False
        self._mark = mark
        return True

    def path(self, file_id: str) -> Path:
        """Where a file's content lies."""
        return self._folder / file_id

    def new_path(self) -> tuple[str, Path]:
        """Id and place of a file that is to be written; only its owner may read it."""
        file_id = f"file-{secrets.token_hex(12)}"
        path = self.path(file_id)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _PRIVATE))
        return file_id, path

    def add_file(self, key_id: str, file_id: str, filename: str, purpose: str) -> StoredFile:
        """Note a file whose content is written."""
        now_s = int(time.time())
        path = self.path(file_id)
        file = StoredFile(
            id=file_id,
            filename=filename,
            bytes=path.stat().st_size,
            created_at=now_s,
            expires_at=now_s + KEPT_S,
            purpose=purpose,
        )
        with self._table.open() as table:
            table.execute(
                "INSERT INTO files VALUES (?, ?, ?, ?)",
                (file_id, key_id, msgspec.json.encode(file), file.expires_at),
            )
        return file

    def files(self, key_id: str) -> list[StoredFile]:
        """Files of a key, the newest first."""
        with self._table.open() as table:
            rows = table.execute(
                "SELECT document FROM files WHERE key_id = ? ORDER BY rowid DESC", (key_id,)
            ).fetchall()
        return [msgspec.json.decode(document, type=StoredFile) for (document,) in rows]

    def file(self, key_id: str, file_id: str) -> StoredFile | None:
        """A key's file; None: it has none of that id."""
        return next((file for file in self.files(key_id) if file.id == file_id), None)

    def delete_file(self, file_id: str) -> None:
        """Delete a file and its content."""
        with self._table.open() as table:
            table.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path(file_id).unlink(missing_ok=True)

    def put(self, key_id: str, batch: RequestBatch) -> None:
        """Keep a batch as it is now."""
        document = msgspec.json.encode(batch)
        row = (batch.id, key_id, document, batch.has_ended, batch.expires_at + KEPT_S)
        with self._table.open() as table:
            table.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?, ?, NULL) ON CONFLICT (id) DO UPDATE"
                " SET document = excluded.document, has_ended = excluded.has_ended",
                row,
            )
            if batch.has_ended:
                table.execute("DELETE FROM answers WHERE batch = ?", (batch.id,))

    def cancel(self, batch_id: str) -> None:
        """Have a batch end before its lines are answered."""
        with self._table.open() as table:
            table.execute(
                "UPDATE batches SET cancelled_at = ? WHERE id = ? AND cancelled_at IS NULL",
                (int(time.time()), batch_id),
            )

    def batches(self, key_id: str) -> list[RequestBatch]:
        """Batches of a key, the newest first."""
        with self._table.open() as table:
            rows = table.execute(f"{_BATCHES} WHERE key_id = ? ORDER BY rowid DESC", (key_id,))
            return [_batch(table, *row)[1] for row in rows.fetchall()]

    def batch(self, key_id: str, batch_id: str) -> RequestBatch | None:
        """A key's batch; None: it has none of that id."""
        return next((batch for batch in self.batches(key_id) if batch.id == batch_id), None)

    def open_batches(self) -> list[tuple[str, RequestBatch]]:
        """Batches that have not ended with their keys' ids, the oldest first."""
        with self._table.open() as table:
            rows = table.execute(f"{_BATCHES} WHERE NOT has_ended ORDER BY rowid")
            return [_batch(table, *row) for row in rows.fetchall()]

    def note_answer(self, batch_id: str, line: int, answer: bytes, *, is_error: bool) -> None:
        """Keep the answer of a line, once."""
        with self._table.open() as table:
            table.execute(
                "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)",
                (batch_id, line, answer, is_error),
            )

    def answered_lines(self, batch_id: str) -> set[int]:
        """Numbers of the lines that have an answer."""
        with self._table.open() as table:
            rows = table.execute("SELECT line FROM answers WHERE batch = ?", (batch_id,))
            return {line for (line,) in rows}

    def write_answers(self, key_id: str, batch_id: str, *, is_error: bool) -> str | None:
        """Write the answers of one kind as a file, in order of the input; None: there are none."""
        name = f"{batch_id}_{'error' if is_error else 'output'}.jsonl"
        # Of a process that was killed before it could say so.
        for file in self.files(key_id):
            if (file.filename, file.purpose) == (name, "batch_output"):
                self.delete_file(file.id)
        with self._table.open() as table:
            rows = table.execute(
                "SELECT answer FROM answers WHERE batch = ? AND is_error = ? ORDER BY line",
                (batch_id, is_error),
            )
            first_row = rows.fetchone()
            if first_row is None:
                return None
            file_id, path = self.new_path()
            with path.open("wb") as content:
                content.write(first_row[0] + b"\n")
                content.writelines(answer + b"\n" for (answer,) in rows)
        return self.add_file(key_id, file_id, name, "batch_output").id

    def delete_old(self) -> None:
        """Delete what is older than `KEPT_S`."""
        now_s = int(time.time())
        with self._table.open() as table:
            rows = table.execute("SELECT id FROM files WHERE expires_at < ?", (now_s,)).fetchall()
            table.execute("DELETE FROM batches WHERE has_ended AND expires_at < ?", (now_s,))
            known_ids = {row[0] for row in table.execute("SELECT id FROM files")}
        for (file_id,) in rows:
            self.delete_file(file_id)
        for path in self._folder.glob("file-*"):
            # What was begun and never noted: its process was killed.
            if path.name not in known_ids and path.stat().st_mtime < now_s - KEPT_S:
                path.unlink(missing_ok=True)
        self._table.forget_deleted()


def _batch(
    table: sqlite3.Connection, key_id: str, document: bytes, cancelled_at: int | None
) -> tuple[str, RequestBatch]:
    """A batch as it is now, with its key's id."""
    batch = msgspec.json.decode(document, type=RequestBatch)
    if batch.has_ended:
        return key_id, batch
    count, errors = table.execute(
        "SELECT COUNT(*), COALESCE(SUM(is_error), 0) FROM answers WHERE batch = ?", (batch.id,)
    ).fetchone()
    counts = RequestCounts(batch.request_counts.total, count - errors, errors)
    batch = msgspec.structs.replace(batch, request_counts=counts)
    if cancelled_at is not None:
        batch = msgspec.structs.replace(batch, status="cancelling", cancelling_at=cancelled_at)
    return key_id, batch
