import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.shell.numerics import FoldRequest, FoldResult, StoredUpdate, fold
from hypergpu.codec import encode_update
from hypergpu.compression import RECORD
from hypergpu.layout import Flat, Float32s
from hypergpu.spec import SCHEMES, Outer
from tests.unit.numerics.fold_files import (
    LAYOUT,
    Setting,
    first_request,
    model_of,
    next_request,
    updates_of,
)

schemes = st.sampled_from(SCHEMES)
momenta = st.sampled_from([0.0, 0.5, 0.9])
counts = st.lists(st.integers(1, 10_000), min_size=1, max_size=5)
seeds = st.integers(0, 2**31)
outers = st.builds(Outer, st.sampled_from([0.3, 0.7, 1.0]), momenta)
requests = st.builds(Setting, schemes, schemes, outers)


@contextmanager
def request_of(samples: list[int], setting: Setting, seed: int) -> Iterator[FoldRequest]:
    with tempfile.TemporaryDirectory() as folder:
        yield first_request(Path(folder), samples, setting, seed)


def bytes_of(flat: Flat) -> bytes:
    return b"".join(
        vector.tobytes() for vector in (flat.parameters, flat.statistics, flat.integers)
    )


class Reference:
    """The fold as whole-array float32 arithmetic, in the order that the contract states."""

    def __init__(self, request: FoldRequest) -> None:
        self.held = model_of(request.base_model.path).parameters
        self.exact = self.held.copy()
        self.momentum = np.zeros_like(self.held)

    def step(self, request: FoldRequest) -> Flat:
        """Take one outer step; gives the model that nodes hold after it."""
        mean = weighted_mean(request, [flat.parameters for flat in updates_of(request)])
        statistics = weighted_mean(request, [flat.statistics for flat in updates_of(request)])
        integers = updates_of(request)[0].integers
        rate, factor = np.float32(request.outer.learning_rate), np.float32(request.outer.momentum)
        if factor:
            self.momentum = factor * self.momentum + mean
            mean = mean + factor * self.momentum
        self.exact = self.exact - rate * mean
        told = Flat(self.exact - self.held, statistics, integers)
        if request.down == "fp32":
            self.held = self.exact
        else:
            # Error feedback is implicit: what is not said stays in the difference.
            self.held = self.exact - encode_update(LAYOUT, request.down, told).residual
        return Flat(self.held, statistics, integers)


def weighted_mean(request: FoldRequest, vectors: list[Float32s]) -> Float32s:
    samples = [update.samples for update in request.updates]
    weights = [np.float32(count / sum(samples)) for count in samples]
    total = weights[0] * vectors[0]
    for weight, vector in zip(weights[1:], vectors[1:], strict=True):
        total = total + weight * vector
    return total


@settings(max_examples=40)
@given(counts, st.builds(Setting, schemes, st.just("fp32"), outers), seeds)
def test_a_fold_has_the_bits_of_whole_array_arithmetic(
    samples: list[int], setting: Setting, seed: int
) -> None:
    with request_of(samples, setting, seed) as first:
        request = first
        reference = Reference(request)
        for _ in range(3):
            result = fold(request)
            expected = reference.step(request)
            assert bytes_of(model_of(result.model.path)) == bytes_of(expected)
            request = next_request(request, result)


@settings(max_examples=40)
@given(counts, requests, seeds)
def test_a_compressed_downlink_follows_whole_array_arithmetic(
    samples: list[int], setting: Setting, seed: int
) -> None:
    with request_of(samples, setting, seed) as first:
        request = first
        reference = Reference(request)
        for _ in range(2):
            result = fold(request)
            expected = reference.step(request).parameters
            held = model_of(result.model.path).parameters
            assert np.allclose(held, expected, rtol=1e-6, atol=1e-7)
            request = next_request(request, result)


@settings(max_examples=30)
@given(counts, requests, seeds, st.integers(1, 9))
def test_the_span_does_not_change_the_bits(
    samples: list[int], setting: Setting, seed: int, records: int
) -> None:
    with request_of(samples, setting, seed) as first:
        request = first
        for _ in range(2):
            result = fold(request)
            assert digests(fold(request, span=records * RECORD)) == digests(result)
            request = next_request(request, result)


def digests(result: FoldResult) -> list[str]:
    return [file.digest for file in result.files]


@settings(max_examples=20)
@given(st.permutations(range(5)), requests, seeds)
def test_the_order_of_arrival_does_not_change_the_bits(
    arrivals: list[int], setting: Setting, seed: int
) -> None:
    with request_of([5, 4, 3, 2, 1], setting, seed) as request:
        expected = digests(fold(request))
        contents = [update.path.read_bytes() for update in request.updates]
        late: dict[int, StoredUpdate] = {}
        for slot in arrivals:
            path = request.output_dir / f"arrived-{len(late)}"
            path.write_bytes(contents[slot])
            late[slot] = msgspec.structs.replace(request.updates[slot], path=path)
        in_slot_order = tuple(late[slot] for slot in sorted(late))
        assert digests(fold(msgspec.structs.replace(request, updates=in_slot_order))) == expected


@settings(max_examples=40)
@given(schemes, seeds, st.data())
def test_one_flipped_bit_anywhere_in_an_update_is_found(
    up: str, seed: int, draw: st.DataObject
) -> None:
    with request_of([1, 1, 1], Setting(up), seed) as request:
        slot = draw.draw(st.integers(0, 2))
        content = bytearray(request.updates[slot].path.read_bytes())
        place = draw.draw(st.integers(0, 8 * len(content) - 1))
        content[place // 8] ^= 1 << place % 8
        request.updates[slot].path.write_bytes(content)
        assert [each.index for each in fold(request).refused] == [slot]
