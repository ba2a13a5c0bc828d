"""Secrets of a coordinator's folder that whoever takes over needs, sealed in the database.

They are sealed under a key of their own, and that under the passphrase that each coordinator has in
a file: the database alone opens nothing.
"""

import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from coincurve import PrivateKey
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import insert, select
from sqlalchemy.engine import Connection

from coordinator.shell.store.journal.schema import SECRETS
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys import Passphrase, decrypt_key, encrypt_key, keystore_of

FILES = (
    "identity/authority.key",
    "identity/coordinator.key",
    "sketches.secret",
    "uploads.key",
    # Last: without it an authority is made anew.
    "identity/authority.pem",
)
"""Within the folder; some need not be there."""
_ROW = "folder"
_SOURCE = "what the database keeps"
_CONTEXT = b"hypergpu/v1/shared-secrets"
_NONCE_BYTES = 12


class _Sealed(msgspec.Struct, frozen=True):
    keystore: bytes
    nonce: bytes
    ciphertext: bytes


class SharedSecrets:
    """The files of one folder, and their copy in a database."""

    def __init__(self, folder: Path, passphrase: Passphrase) -> None:
        self._folder = folder
        self._passphrase = passphrase
        self.are_kept = False
        """Whether the folder and the database are known to have the same."""

    def restore(self, connection: Connection) -> None:
        """Write the files that the folder lacks. Takes about a second, once.

        Raises:
            HyperGPUError: FILE_UNUSABLE, the passphrase is another one, or the folder has secrets
                of its own.
        """
        if self.are_kept or (sealed_secrets := _read_sealed(connection)) is None:
            return
        for name, content in self._open(sealed_secrets).items():
            path = self._folder / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_durably(path, content)
            elif path.read_bytes() != content:
                detail = f"{path} is not what the coordinators on this database share"
                fix = "give this coordinator an empty folder: --data-dir FOLDER"
                raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
        self.are_kept = True

    def keep(self, writer: Callable[[], AbstractContextManager[Connection]]) -> None:
        """Store the folder's files, unless the database has them. Takes about a second, once.

        Args:
            writer: A transaction of the coordinator that drives.
        """
        if self.are_kept:
            return
        # Before the transaction, which must not stand still for so long.
        sealed_secrets = self._seal()
        with writer() as connection:
            if _read_sealed(connection) is None:
                row = {"name": _ROW, "sealed": msgspec.msgpack.encode(sealed_secrets)}
                connection.execute(insert(SECRETS), row)
        self.are_kept = True

    def _seal(self) -> _Sealed:
        contents = {
            name: path.read_bytes() for name in FILES if (path := self._folder / name).exists()
        }
        key, nonce = PrivateKey().secret, secrets.token_bytes(_NONCE_BYTES)
        ciphertext = AESGCM(key).encrypt(nonce, msgspec.msgpack.encode(contents), _CONTEXT)
        return _Sealed(encrypt_key(key, self._passphrase), nonce, ciphertext)

    def _open(self, sealed: _Sealed) -> dict[str, bytes]:
        keystore = keystore_of(sealed.keystore, source=_SOURCE)
        key = decrypt_key(keystore, self._passphrase, source=_SOURCE)
        try:
            packed_contents = AESGCM(key).decrypt(sealed.nonce, sealed.ciphertext, _CONTEXT)
            contents = msgspec.msgpack.decode(packed_contents, type=dict[str, bytes])
        except (InvalidTag, msgspec.MsgspecError) as error:
            detail = "the secrets that the database keeps were altered"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
        return {name: contents[name] for name in FILES if name in contents}


def _read_sealed(connection: Connection) -> _Sealed | None:
    query = select(SECRETS.c.sealed).where(SECRETS.c.name == _ROW)
    packed_secrets = connection.scalar(query)
    return None if packed_secrets is None else msgspec.msgpack.decode(packed_secrets, type=_Sealed)
