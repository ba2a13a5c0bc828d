"""A key in a file: made on the first start, encrypted, and readable by its owner alone."""

from pathlib import Path

from coincurve import PrivateKey

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.files import write_durably
from hypergpu.keys.keystore import (
    CONTENT_BYTES_MAX,
    decrypt_key,
    encrypt_key,
    keystore_of,
)
from hypergpu.keys.passphrase import (
    NAME_A_FILE,
    Passphrase,
    kept_passphrase,
    made_passphrase,
    refuse_shared,
)


def stored_secret(path: Path, passphrase: Passphrase) -> bytes:
    """The 32 bytes of the key in a file, which is made where there is none.

    Takes about a second for a passphrase that somebody thought up.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file cannot be read or written, others can read it, it is
            damaged, or the passphrase is another one.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(path, encrypt_key(PrivateKey().secret, passphrase))
        refuse_shared(path, "the key")
        content = _content(path)
    except OSError as broken:
        what = f"the key {path} cannot be used: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what) from broken
    return decrypt_key(keystore_of(content, source=str(path)), passphrase, source=str(path))


def passphrase_beside(folder: Path, key: Path) -> Passphrase:
    """The passphrase that is made for a key and kept beside the folder that holds it.

    A daemon so starts without anybody's doing, and a copy of the folder opens nothing. None is made
    for a key that has one, which would only hide that it is lost.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is missing, can be neither read nor made, others can read
            it, or it would be lost with whatever the folder is mounted on.
    """
    path = place_beside(folder)
    try:
        has_key = key.exists()
    except OSError as broken:
        what = f"the key {key} cannot be used: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what) from broken
    if has_key:
        return kept_passphrase(path)
    if folder.is_mount() and not path.exists():
        what = f"{folder} is a volume of its own: a passphrase beside it would be lost without it"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix=NAME_A_FILE)
    return made_passphrase(path)


def place_beside(folder: Path) -> Path:
    """Where the passphrase lies that is made for a folder."""
    whole = folder.absolute()
    return whole.with_name(f"{whole.name}.passphrase")


def stored_address(path: Path) -> str:
    """Address of the key in a file, which needs no passphrase.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is not there, cannot be read or is damaged.
    """
    try:
        content = _content(path)
    except OSError as broken:
        what = f"the key {path} cannot be used: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what) from broken
    return "0x" + keystore_of(content, source=str(path)).address


def change_passphrase(path: Path, old: Passphrase, new: Passphrase) -> None:
    """Encrypt the key in a file under another passphrase.

    Raises:
        HyperGPUError: as `stored_secret`.
    """
    secret = stored_secret(path, old)
    try:
        write_durably(path, encrypt_key(secret, new))
    except OSError as broken:
        what = f"the key {path} cannot be written: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what) from broken


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(CONTENT_BYTES_MAX + 1)
