"""Encrypted keys in the format that Ethereum wallets share (Web3 secret storage, version 3).

Scrypt stretches the passphrase, AES-128 in counter mode encrypts, Keccak-256 over half of the
stretched key and the ciphertext authenticates. Any wallet that imports "keystore" files opens ours.
"""

import secrets
import uuid

import msgspec
from coincurve import PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys.keccak import address_text, keccak
from hypergpu.keys.passphrase import Passphrase

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
    stretching = _Stretching(cost, 8, 1, _KEY_BYTES, salt.hex())
    stretched = _stretch(passphrase, stretching)
    ciphertext = _cipher(stretched, iv, secret)
    crypto = _Crypto(
        cipher="aes-128-ctr",
        cipherparams=_CipherParameters(iv.hex()),
        ciphertext=ciphertext.hex(),
        kdf="scrypt",
        kdfparams=stretching,
        mac=keccak(stretched[16:] + ciphertext).hex(),
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
        asked = keystore.crypto.kdfparams
        for text in (asked.salt, keystore.crypto.cipherparams.iv, keystore.crypto.ciphertext):
            bytes.fromhex(text)
        bytes.fromhex(keystore.crypto.mac)
    except (msgspec.MsgspecError, ValueError) as broken:
        raise _unusable(source, f"it is no keystore: {broken}") from broken
    crypto = keystore.crypto
    methods = (keystore.version, crypto.kdf, crypto.cipher)
    if methods != (3, "scrypt", "aes-128-ctr"):
        raise _unusable(source, f"it is of version, kdf and cipher {methods}")
    is_power = asked.n > 1 and asked.n & (asked.n - 1) == 0
    if not (is_power and 0 < asked.r <= 32 and 0 < asked.p <= 16 and asked.dklen == _KEY_BYTES):
        raise _unusable(source, "its scrypt parameters are out of range")
    if 128 * asked.n * asked.r > _STRETCHED_BYTES_MAX:
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
    stretched = _stretch(passphrase, crypto.kdfparams)
    ciphertext = bytes.fromhex(crypto.ciphertext)
    mac = keccak(stretched[16:] + ciphertext)
    if not secrets.compare_digest(mac, bytes.fromhex(crypto.mac)):
        what = f"the passphrase from {passphrase.source} does not open {source}"
        fix = "give the passphrase that it was made with; or restore the file, if it was altered"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what, fix=fix)
    secret = _cipher(stretched, bytes.fromhex(crypto.cipherparams.iv), ciphertext)
    try:
        address = address_of(secret)
    except ValueError as broken:
        raise _unusable(source, "what it holds is no key") from broken
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
