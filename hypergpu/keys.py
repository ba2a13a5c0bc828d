"""Keys at rest: encrypted files in the format of Ethereum wallets, and the passphrases that open
them.

What a key signs is in `hypergpu.crypto`.
"""

import getpass
import os
import secrets
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec
from coincurve import PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from hypergpu.crypto import address_text, keccak
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason

TERMINAL = Path("-")
"""Stands for: ask whoever sits there."""
NAME_A_FILE = (
    "write a passphrase to a file that only this user can read, and name it: --passphrase-file FILE"
)
_BYTES_MAX = 4096
_MADE_BYTES = 32


class Passphrase:
    """What a key is encrypted under."""

    __slots__ = ("is_made", "octets", "source")

    def __init__(self, octets: bytes, source: str, *, is_made: bool) -> None:
        """Take over a passphrase.

        Args:
            octets: As UTF-8.
            source: What to call it where it does not fit.
            is_made: It is 256 random bits, which nobody guesses however fast the guessing is.
        """
        self.octets = octets
        self.source = source
        self.is_made = is_made

    def __repr__(self) -> str:
        """Say where it comes from and nothing else."""
        return f"Passphrase(from {self.source})"


def passphrase_of_text(text: str, source: str) -> Passphrase:
    """A passphrase that came as text, as from the environment. Blanks at its ends do not count.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is empty or longer than 4,096 bytes.
    """
    octets = text.strip().encode()
    if not octets or len(octets) > _BYTES_MAX:
        what = f"the passphrase from {source} has {len(octets)} bytes, not 1 to {_BYTES_MAX}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix="give one line of text")
    return Passphrase(octets, source, is_made=False)


def passphrase_of_file(path: Path) -> Passphrase:
    """A passphrase that an operator keeps in a file, or types where ``path`` is `TERMINAL`.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read, others can read it, or it is no line of
            text; or there is nobody to ask.
    """
    if path == TERMINAL:
        return _ask()
    return passphrase_of_text(_read(path), str(path))


def kept_passphrase(path: Path) -> Passphrase:
    """The passphrase in a file that was made for it.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read, or others can read it.
    """
    return Passphrase(_read(path).strip().encode(), str(path), is_made=True)


def made_passphrase(path: Path) -> Passphrase:
    """The passphrase in a file that was made for it, or that is made now.

    A daemon so starts without anybody's doing, while a copy of the folder with the key alone opens
    nothing.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the file can be neither read nor made, or others can read it.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return kept_passphrase(path)
    except OSError as error:
        what = f"no passphrase can be kept in {path}: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix=NAME_A_FILE) from error
    text = secrets.token_hex(_MADE_BYTES)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    return Passphrase(text.encode(), str(path), is_made=True)


def refuse_shared(path: Path, what: str) -> None:
    """Refuse a secret that others can read.

    Raises:
        HyperGPUError: FILE_UNUSABLE, they can.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        detail = f"others can read {what} {path} (mode {mode:o})"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=f"chmod 600 {path}")


def _read(path: Path) -> str:
    try:
        refuse_shared(path, "the passphrase")
        with path.open("rb") as file:
            return file.read(_BYTES_MAX + 2).decode()
    except OSError as error:
        what = f"the passphrase {path} cannot be read: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what) from error
    except UnicodeDecodeError as error:
        what = f"the passphrase {path} is no text"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix="give one line of text") from error


def _ask() -> Passphrase:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError as error:
        what = "there is no terminal to ask for the passphrase on"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix=NAME_A_FILE) from error
    return passphrase_of_text(getpass.getpass("Passphrase of the key: "), "the terminal")


CONTENT_BYTES_MAX = 8192
SECRET_BYTES = 32
_KEY_BYTES = 32
_STRETCHED_BYTES_MAX = 512 << 20
_COST_GUESSABLE = 1 << 18
"""Scrypt's n for what people think up: 256 MiB and about a second, as other wallets have it."""
_COST_RANDOM = 1 << 12
"""For 256 random bits: there is nobody to slow down, and many daemons may start at once."""


class _Stretching(msgspec.Struct, frozen=True):
    n: int
    r: int
    p: int
    dklen: int
    salt: str


class _CipherParameters(msgspec.Struct, frozen=True):
    iv: str


class _Crypto(msgspec.Struct, frozen=True):
    cipher: str
    cipherparams: _CipherParameters
    ciphertext: str
    kdf: str
    kdfparams: _Stretching
    mac: str


class Keystore(msgspec.Struct, frozen=True):
    """A file's content. Nothing in it is secret by itself."""

    version: int
    id: str
    address: str
    """40 hex digits without ``0x``."""
    crypto: _Crypto


def encrypt_key(secret: bytes, passphrase: Passphrase) -> bytes:
    """Encrypt a key of 32 bytes. Takes about a second for a passphrase that somebody thought up.

    Raises:
        ValueError: it is not a number in [1, group order).
    """
    cost = _COST_RANDOM if passphrase.is_made else _COST_GUESSABLE
    salt, iv = secrets.token_bytes(32), secrets.token_bytes(16)
    kdf_params = _Stretching(cost, 8, 1, _KEY_BYTES, salt.hex())
    stretched_key = _stretch(passphrase, kdf_params)
    ciphertext = _cipher(stretched_key, iv, secret)
    crypto = _Crypto(
        cipher="aes-128-ctr",
        cipherparams=_CipherParameters(iv.hex()),
        ciphertext=ciphertext.hex(),
        kdf="scrypt",
        kdfparams=kdf_params,
        mac=keccak(stretched_key[16:] + ciphertext).hex(),
    )
    return (
        msgspec.json.encode(Keystore(3, str(uuid.uuid4()), address_of(secret)[2:], crypto)) + b"\n"
    )


def keystore_of(content: bytes, *, source: str) -> Keystore:
    """Read a file's content without opening it.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is no keystore of version 3 with scrypt and AES-128-CTR, or
            asks for more memory than 512 MiB.
    """
    if len(content) > CONTENT_BYTES_MAX:
        raise _unusable(
            source, f"it has {len(content)} bytes, at most {CONTENT_BYTES_MAX} are read"
        )
    try:
        keystore = msgspec.json.decode(content, type=Keystore)
        kdf_params = keystore.crypto.kdfparams
        for text in (kdf_params.salt, keystore.crypto.cipherparams.iv, keystore.crypto.ciphertext):
            bytes.fromhex(text)
        bytes.fromhex(keystore.crypto.mac)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _unusable(source, f"it is no keystore: {error}") from error
    crypto = keystore.crypto
    methods = (keystore.version, crypto.kdf, crypto.cipher)
    if methods != (3, "scrypt", "aes-128-ctr"):
        raise _unusable(source, f"it is of version, kdf and cipher {methods}")
    is_power = kdf_params.n > 1 and kdf_params.n & (kdf_params.n - 1) == 0
    if not (
        is_power
        and 0 < kdf_params.r <= 32
        and 0 < kdf_params.p <= 16
        and kdf_params.dklen == _KEY_BYTES
    ):
        raise _unusable(source, "its scrypt parameters are out of range")
    if 128 * kdf_params.n * kdf_params.r > _STRETCHED_BYTES_MAX:
        raise _unusable(source, "its scrypt parameters ask for more than 512 MiB")
    if len(crypto.ciphertext) != 2 * SECRET_BYTES or len(crypto.cipherparams.iv) != 32:
        raise _unusable(source, "its ciphertext is not that of a 32-byte key")
    return keystore


def decrypt_key(keystore: Keystore, passphrase: Passphrase, *, source: str) -> bytes:
    """Open a keystore: the key's 32 bytes.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the passphrase is another one, or the file was altered.
    """
    crypto = keystore.crypto
    stretched_key = _stretch(passphrase, crypto.kdfparams)
    ciphertext = bytes.fromhex(crypto.ciphertext)
    mac = keccak(stretched_key[16:] + ciphertext)
    if not secrets.compare_digest(mac, bytes.fromhex(crypto.mac)):
        what = f"the passphrase from {passphrase.source} does not open {source}"
        fix = "give the passphrase that it was made with; or restore the file, if it was altered"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix=fix)
    secret = _cipher(stretched_key, bytes.fromhex(crypto.cipherparams.iv), ciphertext)
    try:
        address = address_of(secret)
    except ValueError as error:
        raise _unusable(source, "what it holds is no key") from error
    if address[2:] != keystore.address.removeprefix("0x").lower():
        raise _unusable(source, f"it says {keystore.address[:42]} and holds the key of {address}")
    return secret


def address_of(secret: bytes) -> str:
    """Address of the key's account.

    Raises:
        ValueError: it is not a number in [1, group order).
    """
    return address_text(PrivateKey(secret).public_key.format(compressed=False)[1:])


def _stretch(passphrase: Passphrase, asked: _Stretching) -> bytes:
    salt = bytes.fromhex(asked.salt)
    return Scrypt(salt, asked.dklen, asked.n, asked.r, asked.p).derive(passphrase.octets)


def _cipher(stretched: bytes, iv: bytes, text: bytes) -> bytes:
    """Encrypt, which in counter mode is also to decrypt."""
    encryptor = Cipher(algorithms.AES128(stretched[:16]), modes.CTR(iv)).encryptor()
    return encryptor.update(text) + encryptor.finalize()


def _unusable(source: str, why: str) -> HyperGPUError:
    fix = f"restore {source} from a backup; without one its owner is lost: delete it and join again"
    return HyperGPUError(Reason.FILE_UNUSABLE, f"the key {source} is damaged: {why}", fix=fix)


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
    except OSError as error:
        what = f"the key {path} cannot be used: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what) from error
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
    except OSError as error:
        what = f"the key {key} cannot be used: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what) from error
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
    except OSError as error:
        what = f"the key {path} cannot be used: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what) from error
    return "0x" + keystore_of(content, source=str(path)).address


def change_passphrases(paths: Sequence[Path], old: Passphrase, new: Passphrase) -> None:
    """Encrypt the keys in files under another passphrase. None is written unless all open.

    Raises:
        HyperGPUError: as `stored_secret`.
    """
    contents = [encrypt_key(stored_secret(path, old), new) for path in paths]
    for path, content in zip(paths, contents, strict=True):
        try:
            write_durably(path, content)
        except OSError as error:
            what = f"the key {path} cannot be written: {error.strerror}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, what) from error


def _content(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(CONTENT_BYTES_MAX + 1)
