"""Hashing and signing of statements.

Each statement packs its own words (`Statement.encode_data`): the generic encoders of typed data
take 20 times as long, and the tests compare the result with one of them. Signatures have the form
that `hypergpu.keys.signature` describes; contracts take `chain_form`.
"""

import struct
from typing import Protocol

from hypergpu.keys.keccak import keccak
from hypergpu.keys.signature import SIGNATURE_BYTES, IdentityKey, signer_of


class Statement(Protocol):
    """Typed data that somebody signs."""

    def encode_data(self) -> bytes:
        """Type hash and fields, 32 bytes each.

        Raises:
            ValueError: A digest or an address is malformed.
            struct.error: A number does not fit its field.
        """


def struct_hash(statement: Statement) -> bytes:
    """EIP-712's hashStruct: 32 bytes that name a statement, the same in every domain.

    Raises:
        ValueError: A digest or an address is malformed, or a number does not fit its field.
    """
    try:
        return keccak(statement.encode_data())
    except (struct.error, OverflowError) as broken:
        raise ValueError(f"a number does not fit its field: {broken}") from broken


def signed_digest(separator: bytes, hashed: bytes) -> bytes:
    """The 32 bytes that are signed.

    Args:
        separator: `Domain.separator` of the ledger.
        hashed: `struct_hash` of the statement.
    """
    return keccak(b"\x19\x01" + separator + hashed)


def sign(key: IdentityKey, separator: bytes, statement: Statement) -> bytes:
    """Sign a statement: 65 bytes, the same each time. About 0.05 ms.

    Raises:
        ValueError: As `struct_hash`.
    """
    return key.sign_digest(signed_digest(separator, struct_hash(statement)))


def signer(separator: bytes, statement: Statement, signature: bytes) -> str | None:
    """Address whose key signed exactly this statement in this domain; None if there is none.

    Safe for content from outside: it never raises. About 0.1 ms.
    """
    try:
        return signer_of(signed_digest(separator, struct_hash(statement)), signature)
    except ValueError:
        return None


def chain_form(signature: bytes) -> bytes:
    """The same signature with 27 or 28 as its last byte, as contracts take it.

    Raises:
        ValueError: It is not ``r | s | v`` with v 0 or 1.
    """
    if len(signature) != SIGNATURE_BYTES or signature[-1] > 1:
        raise ValueError("a signature is r | s | v, 65 bytes, and v is 0 or 1")
    return signature[:-1] + bytes([signature[-1] + 27])
