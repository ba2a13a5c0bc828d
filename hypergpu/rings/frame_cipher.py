"""Hidden states on their way from a stage to the next one: sealed, so that a relay reads nothing.

Theory of operation. Two members of a ring share a secret by X25519. A key for one direction is
HKDF-SHA256 of it, with the ring's digest as salt and both public keys as info. A frame is the
counter and ChaCha20-Poly1305 of the states::

    u64 counter, big-endian | ciphertext | tag[16]

Its associated data name the ring with its epoch, sender, receiver, pass and rows, so that a frame
opens at one place only: not in another ring, epoch, pass, order or direction. The nonce is four
bytes of zero and the counter. **A counter belongs to the sender's key pair and never goes back**:
it goes on where a ring forms anew, also with the same members, so that no nonce is used twice. A
key pair lives in the memory of one process for one lease. A receiver takes each sender's counters
in ascending order alone: a frame that comes twice, or after a later one, does not open.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

FRAME_EXTRA_BYTES = 24
"""What a frame has beside its states."""
_DOMAIN = b"hypergpu/v1/ring-frame"
_COUNTER = struct.Struct(">Q")
_NONCE_PREFIX = bytes(4)
_KEY_BYTES = 32


class SealedFrameError(ValueError):
    """A frame does not open, or cannot be sealed. The text says why."""


class FramePlace(NamedTuple):
    """Where a frame belongs in its ring."""

    number: int
    """Number of the pass; 0: states that are given again for a stage that was lost."""
    rows: Sequence[tuple[int, int, int]]
    """Session, position of its first row and count of rows, in the order of the states."""


class _Lane(NamedTuple):
    """One direction between two members of one ring."""

    cipher: ChaCha20Poly1305
    names: bytes
    """Associated data that all its frames have."""
    sender: bytes


def generate_ring_secret() -> bytes:
    """A fresh secret key: 32 bytes of the system's randomness."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_ring_key(secret: bytes) -> bytes:
    """The public key of a secret one."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


class FrameCipher:
    """One member's keys: seals for the stage behind, and opens what comes from the stage before.

    Args:
        secret: The member's, of 32 bytes, which no other cipher has or had.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(secret)
        self.public_key = self._key.public_key().public_bytes_raw()
        self._before: _Lane | None = None
        self._after: _Lane | None = None
        self._sealed = 0
        self._opened: dict[bytes, int] = {}
        """Newest counter that was taken of each sender."""

    def enter(self, ring: bytes, before: bytes | None, after: bytes | None) -> None:
        """Take a place in a ring; what was sealed for an earlier one opens no more.

        Args:
            ring: Its digest.
            before: Public key of the stage before; None: this is the first stage.
            after: The same of the stage behind; None: this is the last one.

        Raises:
            SealedFrameError: A key is no key of X25519 that shares a secret.
        """
        own = self.public_key
        self._before = None if before is None else self._lane(ring, before, before + own)
        self._after = None if after is None else self._lane(ring, after, own + after)

    def _lane(self, ring: bytes, other: bytes, direction: bytes) -> _Lane:
        try:
            shared_secret = self._key.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:
            raise SealedFrameError("a member's key shares no secret") from error
        derivation = HKDF(SHA256(), _KEY_BYTES, salt=ring, info=_DOMAIN + direction)
        cipher = ChaCha20Poly1305(derivation.derive(shared_secret))
        return _Lane(cipher, _DOMAIN + ring + direction, direction[:_KEY_BYTES])

    def seal(self, place: FramePlace, states: bytes) -> bytes:
        """Seal states for the stage behind.

        Raises:
            SealedFrameError: There is none.
        """
        if self._after is None:
            raise SealedFrameError("there is no stage behind in a ring that it knows")
        return self._seal_on(self._after, place, states)

    def _seal_on(self, lane: _Lane, place: FramePlace, states: bytes) -> bytes:
        self._sealed += 1
        counter = _COUNTER.pack(self._sealed)
        associated_bytes = lane.names + _place_bytes(place)
        return counter + lane.cipher.encrypt(_NONCE_PREFIX + counter, states, associated_bytes)

    def seal_to(self, context: bytes, receiver: bytes, place: FramePlace, states: bytes) -> bytes:
        """Seal states for somebody who is not in the ring.

        Args:
            context: Digest that names what they are for.
            receiver: Its public key.
            place: Where the states belong.
            states: What is sealed.

        Raises:
            SealedFrameError: The key is no key of X25519 that shares a secret.
        """
        lane = self._lane(context, receiver, self.public_key + receiver)
        return self._seal_on(lane, place, states)

    def open_from(self, context: bytes, sender: bytes, place: FramePlace, frame: bytes) -> bytes:
        """States of a frame that `seal_to` made.

        Raises:
            SealedFrameError: As `open`.
        """
        return self._open_on(self._lane(context, sender, sender + self.public_key), place, frame)

    def open(self, place: FramePlace, frame: bytes) -> bytes:
        """States of a frame of the stage before.

        Raises:
            SealedFrameError: There is none; or the frame is not sealed for this place by it, or it
                came before.
        """
        lane = self._before
        if lane is None:
            raise SealedFrameError("there is no stage before in a ring that it knows")
        return self._open_on(lane, place, frame)

    def _open_on(self, lane: _Lane, place: FramePlace, frame: bytes) -> bytes:
        if len(frame) < FRAME_EXTRA_BYTES:
            raise SealedFrameError(f"a frame has {len(frame)} bytes, and {FRAME_EXTRA_BYTES} least")
        counter_bytes = frame[: _COUNTER.size]
        (counter,) = _COUNTER.unpack(counter_bytes)
        if counter <= self._opened.get(lane.sender, 0):
            raise SealedFrameError(f"frame {counter} came before, or after a later one")
        associated_bytes = lane.names + _place_bytes(place)
        try:
            states = lane.cipher.decrypt(
                _NONCE_PREFIX + counter_bytes, frame[_COUNTER.size :], associated_bytes
            )
        except InvalidTag:
            detail = "a frame is not sealed for this pass by the stage before, or was changed"
            raise SealedFrameError(detail) from None
        self._opened[lane.sender] = counter
        return states


def _place_bytes(place: FramePlace) -> bytes:
    return msgspec.msgpack.encode((place.number, [*place.rows]))
