from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import update

from coordinator.shell.nodes.identity.authority import Authority
from coordinator.shell.nodes.identity.shared_secrets import SharedSecrets
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.schema import SECRETS
from hypergpu.errors import HyperGPUError
from hypergpu.keys import Passphrase
from tests.journals import FolderJournal

PASSPHRASE = Passphrase(b"long and random", "a file", is_made=True)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    folder_journal = FolderJournal(tmp_path)
    yield folder_journal
    folder_journal.close()


def folder_of(path: Path) -> Path:
    path.mkdir()
    return path


def keep(journal: Journal, folder: Path) -> None:
    SharedSecrets(folder, PASSPHRASE).keep(journal.database.writer)


def restore(journal: Journal, folder: Path, passphrase: Passphrase = PASSPHRASE) -> SharedSecrets:
    shared_secrets = SharedSecrets(folder, passphrase)
    with journal.database.reader() as connection:
        shared_secrets.restore(connection)
    return shared_secrets


def test_another_folder_gets_the_same_authority(journal: Journal, tmp_path: Path) -> None:
    first, second = folder_of(tmp_path / "first"), folder_of(tmp_path / "second")
    authority = Authority.open(first / "identity", 0)
    (first / "sketches.secret").write_bytes(bytes(32))
    keep(journal, first)
    assert restore(journal, second).are_kept
    assert Authority.open(second / "identity", 0).digest == authority.digest
    assert (second / "sketches.secret").read_bytes() == bytes(32)
    assert not (second / "uploads.key").exists()


def test_nothing_is_restored_before_anything_is_kept(journal: Journal, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "first")
    assert not restore(journal, folder).are_kept
    assert list(folder.iterdir()) == []


def test_what_was_kept_first_stays(journal: Journal, tmp_path: Path) -> None:
    first, second = folder_of(tmp_path / "first"), folder_of(tmp_path / "second")
    (first / "sketches.secret").write_bytes(bytes(32))
    (second / "sketches.secret").write_bytes(bytes([1]) * 32)
    keep(journal, first)
    keep(journal, second)
    with pytest.raises(HyperGPUError, match=r"second/sketches\.secret is not what .* share"):
        restore(journal, second)
    assert restore(journal, first).are_kept


def test_another_passphrase_opens_nothing(journal: Journal, tmp_path: Path) -> None:
    first, second = folder_of(tmp_path / "first"), folder_of(tmp_path / "second")
    (first / "sketches.secret").write_bytes(bytes(32))
    keep(journal, first)
    other = Passphrase(b"another", "another file", is_made=True)
    with pytest.raises(HyperGPUError, match="from another file does not open what the database"):
        restore(journal, second, other)
    assert list(second.iterdir()) == []


def test_what_was_altered_is_not_taken(journal: Journal, tmp_path: Path) -> None:
    first, second = folder_of(tmp_path / "first"), folder_of(tmp_path / "second")
    (first / "sketches.secret").write_bytes(bytes(32))
    keep(journal, first)
    with journal.database.writer() as connection:
        sealed_bytes = connection.execute(SECRETS.select()).one().sealed
        altered_bytes = sealed_bytes[:-1] + bytes([sealed_bytes[-1] ^ 1])
        connection.execute(update(SECRETS).values(sealed=altered_bytes))
    with pytest.raises(HyperGPUError, match="were altered"):
        restore(journal, second)
