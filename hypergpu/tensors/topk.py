"""The largest magnitudes of each 4,096 values as places and codes on a grid of two numbers.

The rest is not said and waits in the residual.

Record of n values, of which k = ceil(n * kept / 4096) are said: ``2 bfloat16 numbers of the grid |
12-bit places | codes``, each part padded with zeros to a whole byte. Places count within the record
and ascend. A code is a sign above the grid's bits.

Picked are the k largest magnitudes; of equal ones, those at lower places. The rule is exact on
every CPU: a partition finds the k-th largest as an integer, and nothing depends on how it does.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hypergpu.tensors.floats import Uint16s, bf16_bits, floats_of_bf16
from hypergpu.tensors.integers import flushed_reciprocal, largest_magnitude
from hypergpu.tensors.layout import Float32s, Octets
from hypergpu.tensors.records import GROUP, RECORD, Codec, Flaw, RecordRun, record_runs

_INFINITE_BITS = np.uint16(0x7F80)
_START_BITS_END = np.uint16((127 + 127) << 7)
_STEP_BITS_END = np.uint16((127 + 124) << 7)
"""Bits of 2**127 and 2**124: a start and seven steps below them are finite together."""

_EVEN_CODE_MAX = np.float32(7)


class Fitted(NamedTuple):
    """A grid for each row, as bfloat16 bits ``uint16[rows, 2]``, and each magnitude's code."""

    numbers: Uint16s
    codes: Octets


class Grid(Protocol):
    """A few magnitudes, found anew for each row."""

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        ...

    def fit(self, magnitudes: Float32s) -> Fitted:
        """Choose the numbers for ``float32[rows, count]``; what is not finite gives numbers that
        `is_finite` denies.
        """
        ...

    def magnitudes(self, numbers: Uint16s, codes: Octets) -> Float32s:
        """The magnitudes that codes stand for, ``float32[rows, count]``."""
        ...

    def is_finite(self, numbers: Uint16s) -> bool:
        """Whether every code gives a finite magnitude. Negative numbers have larger bits, and are
        denied too: no encoder writes one.
        """
        ...


class TwoCentroids(Grid):
    """The mean of the magnitudes up to their mean, and the mean of those above it: one bit."""

    code_bits = 1

    def fit(self, magnitudes: Float32s) -> Fitted:
        """See `Grid`."""
        rows, count = magnitudes.shape
        width = 1 << (count - 1).bit_length()
        shares = np.zeros((rows, width), np.float32)
        # Divided before they are added, so that no sum overflows; exact, by a power of two.
        np.multiply(magnitudes, np.float32(1 / width), out=shares[:, :count])
        mean = _row_sums(shares) * np.float32(width / count)
        is_upper = magnitudes > mean[:, None]
        upper = np.zeros_like(shares)
        np.multiply(shares[:, :count], is_upper, out=upper[:, :count])
        shares -= upper
        upper_counts = is_upper.sum(axis=1, dtype=np.int32)
        counts = np.stack((count - upper_counts, upper_counts), axis=1)
        factors = np.float32(width) / np.maximum(counts, 1).astype(np.float32)
        means = np.stack((_row_sums(shares), _row_sums(upper)), axis=1) * factors
        return Fitted(bf16_bits(means), is_upper.view(np.uint8))

    def magnitudes(self, numbers: Uint16s, codes: Octets) -> Float32s:
        """See `Grid`."""
        lower, upper = np.split(floats_of_bf16(numbers), 2, axis=1)
        centroids: Float32s = np.where(codes.view(np.bool_), upper, lower)
        return centroids

    def is_finite(self, numbers: Uint16s) -> bool:
        """See `Grid`."""
        return bool((numbers < _INFINITE_BITS).all())


class EvenSteps(Grid):
    """From the smallest magnitude to the largest in seven even steps: three bits.

    The first number is the smallest, the second the step; a step below 2**-126 is zero.
    """

    code_bits = 3

    def fit(self, magnitudes: Float32s) -> Fitted:
        """See `Grid`."""
        start = magnitudes.min(axis=1)
        step = (largest_magnitude(magnitudes) - start) / _EVEN_CODE_MAX
        numbers = bf16_bits(np.stack((start, step), axis=1))
        rounded_numbers = floats_of_bf16(numbers)
        reciprocals = flushed_reciprocal(rounded_numbers[:, 1])
        quotients = (magnitudes - rounded_numbers[:, :1]) * reciprocals[:, None]
        np.rint(quotients, out=quotients)
        np.clip(quotients, np.float32(0), _EVEN_CODE_MAX, out=quotients)
        return Fitted(bf16_bits(rounded_numbers), quotients.astype(np.uint8) & np.uint8(7))

    def magnitudes(self, numbers: Uint16s, codes: Octets) -> Float32s:
        """See `Grid`."""
        rounded_numbers = floats_of_bf16(numbers)
        magnitudes = codes.astype(np.float32)
        magnitudes *= rounded_numbers[:, 1:]
        magnitudes += rounded_numbers[:, :1]
        return magnitudes

    def is_finite(self, numbers: Uint16s) -> bool:
        """See `Grid`."""
        ends = np.array([_START_BITS_END, _STEP_BITS_END])
        return bool((numbers < ends).all())


def _row_sums(values: Float32s) -> Float32s:
    """Sum ``float32[rows, width]`` over its rows by halves; the width is a power of two."""
    while (half := values.shape[1] // 2) > 0:
        values = values[:, :half] + values[:, half:]
    sums: npt.NDArray[np.float32] = values[:, 0]
    return sums


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` numbers of ``bits`` bits need."""
    return -(-count * bits // 8)


def pack_places(places: Uint16s, out: Octets) -> None:
    """Write ``uint16[rows, count]`` below 4,096 as 12 bits each: two in three bytes."""
    rows, count = places.shape
    pairs = np.zeros((rows, -(-count // 2), 2), np.uint16)
    pairs.reshape(rows, -1)[:, :count] = places
    low, high = pairs[:, :, 0], pairs[:, :, 1]
    packed_places = np.empty((*low.shape, 3), np.uint8)
    np.copyto(packed_places[:, :, 0], low, casting="unsafe")
    np.copyto(packed_places[:, :, 1], (low >> 8) | (high << 4), casting="unsafe")
    np.copyto(packed_places[:, :, 2], high >> 4, casting="unsafe")
    out[:] = packed_places.reshape(rows, -1)[:, : out.shape[1]]


def unpack_places(packed: Octets, count: int) -> Uint16s:
    """Read what `pack_places` wrote, ``uint8[rows, bytes]`` as ``uint16[rows, count]``."""
    rows = len(packed)
    triples = np.zeros((rows, -(-count // 2), 3), np.uint16)
    triples.reshape(rows, -1)[:, : packed.shape[1]] = packed
    pairs = np.empty((*triples.shape[:2], 2), np.uint16)
    middle = triples[:, :, 1]
    np.bitwise_or(triples[:, :, 0], (middle & 15) << 8, out=pairs[:, :, 0])
    np.bitwise_or(middle >> 4, triples[:, :, 2] << 4, out=pairs[:, :, 1])
    return pairs.reshape(rows, -1)[:, :count]


def pack_codes(codes: Octets, bits: int, out: Octets) -> None:
    """Write ``uint8[rows, count]`` below ``2**bits``, the first in each byte's lowest bits."""
    rows, count = codes.shape
    in_byte = 8 // bits
    padded_codes = np.zeros((rows, out.shape[1], in_byte), np.uint8)
    padded_codes.reshape(rows, -1)[:, :count] = codes
    np.copyto(out, padded_codes[:, :, 0])
    for place in range(1, in_byte):
        out |= padded_codes[:, :, place] << (bits * place)


def unpack_codes(packed: Octets, bits: int, count: int) -> Octets:
    """Read what `pack_codes` wrote, ``uint8[rows, bytes]`` as ``uint8[rows, count]``."""
    in_byte = 8 // bits
    codes = np.empty((*packed.shape, in_byte), np.uint8)
    for place in range(in_byte):
        np.right_shift(packed, bits * place, out=codes[:, :, place])
    codes &= 2**bits - 1
    return codes.reshape(len(packed), -1)[:, :count]


Places = npt.NDArray[np.intp]

_NUMBERS_BYTES = 4
_PLACE_BITS = 12
_MAGNITUDE_BITS = np.uint32(0x7FFF_FFFF)
_RESIDUAL_DECAY = 0.95
"""Decay as in SparseLoCo (arXiv:2508.15706): old residuals weigh less than new ones."""


class Entries(NamedTuple):
    """What a payload says: at these places, in ascending order, these values."""

    places: Places
    values: Float32s


class _Said(NamedTuple):
    """What was written of a part: flat places in it, and a row of codes and signs a record."""

    places: Places
    fitted: Fitted
    signs: Octets


class TopK(Codec):
    """Error of what is said at most the spread of the magnitudes said; of the rest, all of it."""

    is_sparse = True
    residual_decay = _RESIDUAL_DECAY
    group = 8 * GROUP
    """So many that what is done to the few values said is not all overhead."""

    def __init__(self, kept: int, grid: Grid) -> None:
        self._kept = kept
        self._grid = grid
        self._code_bits = 1 + grid.code_bits
        self._record_bytes = self._bytes_of(RECORD)

    @property
    def name(self) -> str:
        """See `Codec`."""
        return f"topk{self._kept}"

    def encoded_bytes(self, count: int) -> int:
        """See `Codec`."""
        full, rest = divmod(count, RECORD)
        return full * self._record_bytes + (self._bytes_of(rest) if rest else 0)

    def encode(self, values: Float32s, out: Octets) -> None:
        """See `Codec`."""
        for part in record_runs(self, values.size):
            self._encode_part(values[part.values], part, out[part.bytes])

    def encode_leaving_rest(self, total: Float32s, out: Octets, scratch: Float32s) -> None:
        """See `Codec`."""
        for part in record_runs(self, total.size):
            rest = total[part.values]
            encoded_part = self._encode_part(rest, part, out[part.bytes])
            magnitudes = self._grid.magnitudes(
                encoded_part.fitted.numbers, encoded_part.fitted.codes
            )
            rest[encoded_part.places] -= _set_signs(magnitudes, encoded_part.signs).reshape(-1)

    def decode(self, payload: Octets, out: Float32s) -> None:
        """See `Codec`."""
        out[:] = 0
        for part in record_runs(self, out.size):
            entries = self._entries(payload, part)
            out[entries.places] = entries.values

    def entries(self, payload: Octets, count: int) -> Entries:
        """What ``payload`` says of ``count`` values that begin at a record.

        A place past the end of a damaged payload is taken for the last.
        """
        parts = [self._entries(payload, part) for part in record_runs(self, count)]
        if len(parts) == 1:
            return parts[0]
        return Entries(
            np.concatenate([part.places for part in parts]) if parts else np.empty(0, np.intp),
            np.concatenate([part.values for part in parts]) if parts else np.empty(0, np.float32),
        )

    def flaw(self, payload: Octets, count: int) -> Flaw | None:
        """See `Codec`."""
        for part in record_runs(self, count):
            numbers, places, _ = self._unpack(payload, part)
            if not self._grid.is_finite(numbers):
                return Flaw.NOT_FINITE
            if not (places[:, 1:] > places[:, :-1]).all() or (places[:, -1] >= part.length).any():
                return Flaw.MALFORMED
        return None

    def _bytes_of(self, length: int) -> int:
        kept_count = self._said_of(length)
        codes = packed_bytes(kept_count, self._code_bits)
        return _NUMBERS_BYTES + packed_bytes(kept_count, _PLACE_BITS) + codes

    def _said_of(self, length: int) -> int:
        return -(-length * self._kept // RECORD)

    def _encode_part(self, values: Float32s, part: RecordRun, out: Octets) -> _Said:
        """Write the part's records, and say what is in them."""
        rows, kept_count = part.rows, self._said_of(part.length)
        places = _largest(values.reshape(rows, part.length), kept_count)
        kept_bits = values[places].view(np.uint32).reshape(rows, kept_count)
        with np.errstate(invalid="ignore", over="ignore"):  # The grid's numbers will tell.
            grid_fit = self._grid.fit((kept_bits & _MAGNITUDE_BITS).view(np.float32))
        signs = (kept_bits >> np.uint32(31)).astype(np.uint8)
        within = places.reshape(rows, kept_count) - part.length * np.arange(rows)[:, None]
        records = out.reshape(rows, -1)
        codes_start = _NUMBERS_BYTES + packed_bytes(kept_count, _PLACE_BITS)
        records[:, :_NUMBERS_BYTES] = grid_fit.numbers.view(np.uint8)
        pack_places(within.astype(np.uint16), records[:, _NUMBERS_BYTES:codes_start])
        codes = grid_fit.codes | (signs << np.uint8(self._grid.code_bits))
        pack_codes(codes, self._code_bits, records[:, codes_start:])
        return _Said(places, grid_fit, signs)

    def _entries(self, payload: Octets, part: RecordRun) -> Entries:
        numbers, places, codes = self._unpack(payload, part)
        magnitudes = self._grid.magnitudes(numbers, codes & (2**self._grid.code_bits - 1))
        values = _set_signs(magnitudes, codes >> np.uint8(self._grid.code_bits))
        flat = np.minimum(places, part.length - 1).astype(np.intp)
        flat += np.arange(part.values.start, part.values.stop, part.length)[:, None]
        return Entries(flat.reshape(-1), values.reshape(-1))

    def _unpack(self, payload: Octets, part: RecordRun) -> tuple[Uint16s, Uint16s, Octets]:
        """Numbers, places and codes, a row for each record."""
        records, kept_count = payload[part.bytes].reshape(part.rows, -1), self._said_of(part.length)
        codes_start = _NUMBERS_BYTES + packed_bytes(kept_count, _PLACE_BITS)
        numbers = records[:, :_NUMBERS_BYTES].copy().view(np.uint16)
        places = unpack_places(records[:, _NUMBERS_BYTES:codes_start], kept_count)
        return numbers, places, unpack_codes(records[:, codes_start:], self._code_bits, kept_count)


def _set_signs(magnitudes: Float32s, signs: Octets) -> Float32s:
    """Set the signs, in place."""
    bits = magnitudes.view(np.uint32)
    bits |= signs.astype(np.uint32) << np.uint32(31)
    return magnitudes


def _largest(values: Float32s, said: int) -> Places:
    """Flat places of the ``said`` largest magnitudes of each row, ascending."""
    rows, length = values.shape
    step = max(1, GROUP // length)
    flat_places = np.empty(rows * said, np.intp)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        places = _largest_of_few(values[start:stop], said)
        np.add(places, start * length, out=flat_places[start * said : stop * said])
    return flat_places


def _largest_of_few(values: Float32s, said: int) -> Places:
    length = values.shape[1]
    magnitudes = values.view(np.uint32) & _MAGNITUDE_BITS
    least = np.partition(magnitudes, length - said, axis=1)[:, length - said, None]
    is_picked = magnitudes >= least
    places = np.flatnonzero(is_picked)
    if places.size == said * len(values):
        return places
    for row in np.flatnonzero(is_picked.sum(axis=1) > said):
        ties = np.flatnonzero(magnitudes[row] == least[row])
        is_picked[row, ties[said - np.count_nonzero(magnitudes[row] > least[row]) :]] = False
    return np.flatnonzero(is_picked)


TOP_K = (TopK(256, EvenSteps()), TopK(64, TwoCentroids()), TopK(16, TwoCentroids()))
