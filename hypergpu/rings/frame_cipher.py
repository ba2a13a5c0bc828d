"""Hidden states on their way from a stage to the next one, and gradients on their way back: sealed,
so that a relay reads nothing.

Theory of operation. Two members of a ring share a secret by X25519. A key for one direction is
HKDF-SHA256 of it, with the ring's digest as salt and both public keys as info. A frame is the
counter and ChaCha20-Poly1305 of the rows::

    u64 counter, big-endian | ciphertext | tag[16]

Its associated data name the ring with its epoch, sender, receiver, and the pass with its rows or
the micro-batch with its step and direction, so that a frame opens at one place only: not in another
ring, epoch, pass, step, order or direction. The nonce is four bytes of zero and the counter. **A
counter belongs to the sender's key pair and never goes back**: it counts frames in both directions,
and goes on where a ring forms anew, also with the same members, so that no nonce is used twice. A
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

    @property
    def is_backward(self) -> bool:
        """Whether it goes to the stage before: hidden states never do."""
        return False

    @property
    def names(self) -> bytes:
        """What its frame is bound to."""
        return msgspec.msgpack.encode((self.number, [*self.rows]))


class MicroBatchPlace(NamedTuple):
    """Where a frame of a training belongs in its ring."""

    step: int
    micro_batch: int
    is_backward: bool
    """Whether it has gradients, for the stage before; else activations, for the stage behind."""
    is_evaluation: bool = False
    """Whether its rows are held out: numbers of their micro-batches are their own."""

    @property
    def names(self) -> bytes:
        """What its frame is bound to."""
        return msgspec.msgpack.encode(("train", *self))


AnyFramePlace = FramePlace | MicroBatchPlace


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
    """One member's keys: seals for the stages beside it, and opens what comes from them.

    Args:
        secret: The member's, of 32 bytes, which no other cipher has or had.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(secret)
        self.public_key = self._key.public_key().public_bytes_raw()
        self._ways_in: dict[bool, _Lane] = {}
        """What comes, forward from the stage before and backward from the one behind."""
        self._ways_out: dict[bool, _Lane] = {}
        """What goes, forward to the stage behind and backward to the one before."""
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
        self._ways_in, self._ways_out = {}, {}
        for is_backward, source, target in ((False, before, after), (True, after, before)):
            if source is not None:
                self._ways_in[is_backward] = self._lane(ring, source, own)
            if target is not None:
                self._ways_out[is_backward] = self._lane(ring, own, target)

    def _lane(self, ring: bytes, sender: bytes, receiver: bytes) -> _Lane:
        """One direction, whose key no other one has."""
        other = receiver if sender == self.public_key else sender
        direction = sender + receiver
        try:
            shared_secret = self._key.exchange(X25519PublicKey.from_public_bytes(other))
        except ValueError as error:
            raise SealedFrameError("a member's key shares no secret") from error
        derivation = HKDF(SHA256(), _KEY_BYTES, salt=ring, info=_DOMAIN + direction)
        cipher = ChaCha20Poly1305(derivation.derive(shared_secret))
        return _Lane(cipher, _DOMAIN + ring + direction, sender)

    def seal(self, place: AnyFramePlace, rows: bytes) -> bytes:
        """Seal states for the stage behind, or gradients for the one before.

        Raises:
            SealedFrameError: There is none.
        """
        lane = self._ways_out.get(place.is_backward)
        if lane is None:
            where = _neighbour(is_before=place.is_backward)
            raise SealedFrameError(f"there is no {where} in a ring that it knows")
        return self._seal_on(lane, place, rows)

    def _seal_on(self, lane: _Lane, place: AnyFramePlace, rows: bytes) -> bytes:
        self._sealed += 1
        counter = _COUNTER.pack(self._sealed)
        associated_bytes = lane.names + place.names
        return counter + lane.cipher.encrypt(_NONCE_PREFIX + counter, rows, associated_bytes)

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
        return self._seal_on(self._lane(context, self.public_key, receiver), place, states)

    def open_from(self, context: bytes, sender: bytes, place: FramePlace, frame: bytes) -> bytes:
        """States of a frame that `seal_to` made.

        Raises:
            SealedFrameError: As `open`.
        """
        lane = self._lane(context, sender, self.public_key)
        return self._open_on(lane, "stage that was told", place, frame)

    def open(self, place: AnyFramePlace, frame: bytes) -> bytes:
        """States of a frame of the stage before, or gradients of one of the stage behind.

        Raises:
            SealedFrameError: There is none; or the frame is not sealed for this place by it, or it
                came before.
        """
        lane, where = (
            self._ways_in.get(place.is_backward),
            _neighbour(is_before=not place.is_backward),
        )
        if lane is None:
            raise SealedFrameError(f"there is no {where} in a ring that it knows")
        return self._open_on(lane, where, place, frame)

    def _open_on(self, lane: _Lane, where: str, place: AnyFramePlace, frame: bytes) -> bytes:
        if len(frame) < FRAME_EXTRA_BYTES:
            raise SealedFrameError(f"a frame has {len(frame)} bytes, and {FRAME_EXTRA_BYTES} least")
        counter_bytes = frame[: _COUNTER.size]
        (counter,) = _COUNTER.unpack(counter_bytes)
        if counter <= self._opened.get(lane.sender, 0):
            raise SealedFrameError(f"frame {counter} came before, or after a later one")
        associated_bytes = lane.names + place.names
        try:
            rows = lane.cipher.decrypt(
                _NONCE_PREFIX + counter_bytes, frame[_COUNTER.size :], associated_bytes
            )
        except InvalidTag:
            what = "pass" if isinstance(place, FramePlace) else "micro-batch"
            detail = f"a frame is not sealed for this {what} by the {where}, or was changed"
            raise SealedFrameError(detail) from None
        self._opened[lane.sender] = counter
        return rows


def _neighbour(*, is_before: bool) -> str:
    return "stage before" if is_before else "stage behind"
