"""Keys of the API, as this machine keeps them: in a file of the user's own, as hashes.

A key is shown once. It may be bound to models, to a number of tokens and to a time; what it used is
counted in the same file, so that two answers at once cannot use what is left twice.
"""

import secrets
import time
from pathlib import Path

import msgspec
from blake3 import blake3

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.serving.private_table import PrivateTable

PREFIX = "sk-hgpu-"
_SECRET_BYTES = 32
_TABLE = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    digest BLOB NOT NULL UNIQUE,
    models TEXT NOT NULL,
    tokens_most INTEGER,
    tokens_used INTEGER NOT NULL DEFAULT 0,
    ends_unix_s INTEGER NOT NULL,
    is_revoked INTEGER NOT NULL DEFAULT 0,
    calls_per_minute INTEGER,
    priority INTEGER NOT NULL DEFAULT 0
)
"""
_MORE_COLUMNS = {
    "calls_per_minute": "ALTER TABLE keys ADD COLUMN calls_per_minute INTEGER",
    "priority": "ALTER TABLE keys ADD COLUMN priority INTEGER NOT NULL DEFAULT 0",
}
"""Columns that files of versions before lack."""
_ALL = """
SELECT id, name, models, tokens_most, tokens_used, ends_unix_s, is_revoked, calls_per_minute,
    priority
FROM keys ORDER BY rowid
"""
_BY_DIGEST = """
SELECT id, name, models, tokens_most, tokens_used, ends_unix_s, is_revoked, calls_per_minute,
    priority
FROM keys WHERE digest = ?
"""


class ApiKeyView(msgspec.Struct, frozen=True):
    """A key, without its secret."""

    id: str
    name: str
    models: tuple[str, ...]
    """Models that it may call; none: all of its user."""
    tokens_most: int | None
    """Tokens that it may use, of prompts and answers; None: no limit."""
    tokens_used: int
    ends_unix_s: int
    """0: it does not end."""
    is_revoked: bool
    calls_per_minute: int | None = None
    """Requests that it may make a minute; None: no limit of its own."""
    priority: int = 0
    """Its calls go before those of lower ones, where calls wait for a replica."""

    @property
    def is_good(self) -> bool:
        """Whether it is neither revoked nor over."""
        return not self.is_revoked and (not self.ends_unix_s or time.time() < self.ends_unix_s)

    def may_call(self, model: str) -> bool:
        """Whether it may call a model."""
        return not self.models or model in self.models


class ApiKeyMade(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/api-key/1"):
    """A new key: its text is shown once."""

    key: str
    id: str


class ApiKeyList(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/api-keys/1"):
    """All keys, as JSON has them."""

    keys: list[ApiKeyView]


class ApiKeys:
    """The keys in one file, which any number of processes may open."""

    def __init__(self, path: Path) -> None:
        """Open the file, which is made where it is missing.

        Raises:
            HyperGPUError: FILE_UNUSABLE.
        """
        self._table = PrivateTable(path, "move the file away: keys are then made anew")
        with self._table.open() as table:
            table.execute(_TABLE)
            columns = {row[1] for row in table.execute("PRAGMA table_info(keys)")}
            for column, statement in _MORE_COLUMNS.items():
                if column not in columns:
                    table.execute(statement)

    def add(
        self,
        name: str = "",
        *,
        models: tuple[str, ...] = (),
        tokens_most: int | None = None,
        lasts_s: int = 0,
        calls_per_minute: int | None = None,
        priority: int = 0,
    ) -> ApiKeyMade:
        """Make a key.

        Args:
            name: For people.
            models: Models that it may call; none: all.
            tokens_most: Tokens that it may use; None: no limit.
            lasts_s: Seconds after which it ends; 0: it does not.
            calls_per_minute: Requests that it may make a minute; None: no limit of its own.
            priority: Calls of higher ones go first where calls wait.
        """
        secret, key_id = secrets.token_urlsafe(_SECRET_BYTES), f"key-{secrets.token_hex(4)}"
        ends_unix_s = int(time.time()) + lasts_s if lasts_s else 0
        digest = _digest(PREFIX + secret)
        row = (
            key_id, name, digest, "\n".join(models), tokens_most, ends_unix_s, calls_per_minute,
            priority,
        )  # fmt: skip
        with self._table.open() as table:
            table.execute(
                "INSERT INTO keys"
                " (id, name, digest, models, tokens_most, ends_unix_s, calls_per_minute,"
                " priority) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                row,
            )
        return ApiKeyMade(PREFIX + secret, key_id)

    def all(self) -> list[ApiKeyView]:
        """Every key, in order of making."""
        with self._table.open() as table:
            rows = table.execute(_ALL).fetchall()
        return [_view(row) for row in rows]

    def revoke(self, name: str) -> ApiKeyView:
        """Void a key at once, by its id or its name.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, none or several have it.
        """
        matches = [key for key in self.all() if name in {key.id, key.name}]
        if len(matches) != 1:
            detail = f"{len(matches)} keys have the id or name {name!r}"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="see them: hypergpu key ls")
        with self._table.open() as table:
            table.execute("UPDATE keys SET is_revoked = 1 WHERE id = ?", (matches[0].id,))
        return msgspec.structs.replace(matches[0], is_revoked=True)

    def check(self, text: str) -> ApiKeyView | None:
        """The good key of a text; None: there is none."""
        with self._table.open() as table:
            row = table.execute(_BY_DIGEST, (_digest(text),)).fetchone()
        key = None if row is None else _view(row)
        return key if key is not None and key.is_good else None

    def is_good(self, key_id: str) -> bool:
        """Whether a key that was good still is."""
        return any(key.is_good for key in self.all() if key.id == key_id)

    def use(self, key_id: str, tokens: int) -> bool:
        """Count tokens as used. False: so many are not left, and nothing is counted.

        Args:
            key_id: The key.
            tokens: More tokens; fewer than 0: some that were counted were not used.
        """
        with self._table.open() as table:
            count = table.execute(
                "UPDATE keys SET tokens_used = MAX(0, tokens_used + ?) WHERE id = ?"
                " AND (? <= 0 OR tokens_most IS NULL OR tokens_used + ? <= tokens_most)",
                (tokens, key_id, tokens, tokens),
            ).rowcount
        return bool(count)

    def exhaust(self, key_id: str) -> None:
        """Count all that is left of a budget as used."""
        with self._table.open() as table:
            table.execute(
                "UPDATE keys SET tokens_used = tokens_most WHERE id = ?"
                " AND tokens_most IS NOT NULL AND tokens_used < tokens_most",
                (key_id,),
            )


def _digest(text: str) -> bytes:
    return blake3(text.encode()).digest()


def _view(
    row: tuple[str, str, str, int | None, int, int, int, int | None, int],
) -> ApiKeyView:
    key_id, name, models, tokens_most, tokens_used, ends_unix_s, is_revoked, rate, priority = row
    return ApiKeyView(
        key_id,
        name,
        tuple(models.split("\n")) if models else (),
        tokens_most,
        tokens_used,
        ends_unix_s,
        bool(is_revoked),
        rate,
        priority,
    )
