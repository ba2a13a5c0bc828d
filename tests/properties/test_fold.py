import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.request import PLAIN_STEP, FoldRequest, FoldResult, StoredUpdate
from hypergpu.jobfile.spec import SCHEMES, Outer
from hypergpu.tensors.codec import decode_parameters, encode_update
from hypergpu.tensors.compression import RECORD, TopK, scheme_named
from hypergpu.tensors.layout import Flat, Float32s
from tests.unit.aggregation.fold_files import (
    LAYOUT,
    FoldSetting,
    first_request,
    model_of,
    next_request,
    updates_of,
)

Float64s = npt.NDArray[np.float64]

schemes = st.sampled_from(SCHEMES)
dense = st.sampled_from([name for name in SCHEMES if not scheme_named(name).is_sparse])
sparse = st.sampled_from([name for name in SCHEMES if scheme_named(name).is_sparse])
dense_mixes = st.tuples(dense, dense)
mixes = st.tuples(schemes, schemes, schemes)
momenta = st.sampled_from([0.0, 0.5, 0.9])
counts = st.lists(st.integers(1, 10_000), min_size=1, max_size=5)
seeds = st.integers(0, 2**31)
outers = st.one_of(st.builds(Outer, st.sampled_from([0.3, 0.7, 1.0]), momenta), st.just(PLAIN_STEP))
requests = st.builds(FoldSetting, mixes, schemes, outers)


@contextmanager
def request_of(samples: list[int], setting: FoldSetting, seed: int) -> Iterator[FoldRequest]:
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


def mean_over_senders(request: FoldRequest) -> Float64s:
    """What the contract says of parameters, coordinate by coordinate in float64."""
    total = np.zeros(LAYOUT.parameters_count)
    weights, senders = np.zeros_like(total), np.zeros_like(total)
    for update, flat in zip(request.updates, updates_of(request), strict=True):
        scheme, has_sent = scheme_named(update.scheme), np.ones(total.size, np.bool_)
        if isinstance(scheme, TopK):
            has_sent[: LAYOUT.large_count] = False
            payload = np.fromfile(update.path, np.uint8)
            has_sent[scheme.entries(payload, LAYOUT.large_count).places] = True
        total += update.samples * flat.parameters.astype(np.float64)
        weights += update.samples * has_sent
        senders += has_sent
    total /= np.maximum(weights, 1)
    is_mixed = any(scheme_named(update.scheme).is_sparse for update in request.updates)
    if is_mixed and len(request.updates) > 1:
        total[senders == 1] /= 2
    return total


@settings(max_examples=60)
@given(counts, mixes, sparse, st.sampled_from([1.0, 0.25, 3.0]), seeds)
def test_sparse_updates_are_averaged_over_those_who_sent_a_coordinate(
    samples: list[int], mix: tuple[str, ...], last: str, scale: float, seed: int
) -> None:
    setting = FoldSetting((*mix, last), "fp32", PLAIN_STEP)
    with request_of(samples, setting, seed) as first:
        request = msgspec.structs.replace(first, scale=scale)
        start = model_of(request.base_model.path).parameters
        model = model_of(fold(request).model.path)
        expected = start - scale * mean_over_senders(request)
        assert np.allclose(model.parameters, expected, rtol=1e-6, atol=1e-7)
        statistics = weighted_mean(request, [flat.statistics for flat in updates_of(request)])
        assert np.array_equal(model.statistics, statistics)


@settings(max_examples=30)
@given(counts, mixes, sparse, st.sampled_from([Outer(), PLAIN_STEP]), seeds)
def test_a_sparse_downlink_says_the_largest_of_what_nodes_lack_and_keeps_the_rest(
    samples: list[int], ups: tuple[str, ...], down: str, outer: Outer, seed: int
) -> None:
    with request_of(samples, FoldSetting(ups, down, outer), seed) as first:
        request = first
        for _ in range(2):
            result = fold(request)
            assert result.outer_state is not None
            assert result.delta is not None
            held = model_of(request.base_model.path).parameters
            exact = np.fromfile(result.outer_state.path, np.float32, LAYOUT.parameters_count)
            model = model_of(result.model.path)
            lacking = Flat(exact - held, model.statistics, model.integers)
            expected = encode_update(LAYOUT, down, lacking).payload
            assert result.delta.path.read_bytes() == expected.tobytes()
            said = decode_parameters(LAYOUT, down, expected)
            assert np.array_equal(model.parameters, held + said)
            request = next_request(request, result)


def weighted_mean(request: FoldRequest, vectors: list[Float32s]) -> Float32s:
    samples = [update.samples for update in request.updates]
    weights = [np.float32(count / sum(samples)) for count in samples]
    total = weights[0] * vectors[0]
    for weight, vector in zip(weights[1:], vectors[1:], strict=True):
        total = total + weight * vector
    return total


@settings(max_examples=40)
@given(counts, st.builds(FoldSetting, dense_mixes, st.just("fp32"), outers), seeds)
def test_a_fold_has_the_bits_of_whole_array_arithmetic(
    samples: list[int], setting: FoldSetting, seed: int
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
@given(counts, st.builds(FoldSetting, dense_mixes, dense, outers), seeds)
def test_a_compressed_downlink_follows_whole_array_arithmetic(
    samples: list[int], setting: FoldSetting, seed: int
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
    samples: list[int], setting: FoldSetting, seed: int, records: int
) -> None:
    with request_of(samples, setting, seed) as first:
        request = first
        for _ in range(2):
            result = fold(request)
            other = fold(request, span=records * RECORD)
            assert digests(other) == digests(result)
            assert other.agreement == result.agreement
            request = next_request(request, result)


def digests(result: FoldResult) -> list[str]:
    return [file.digest for file in result.files]


@settings(max_examples=20)
@given(st.permutations(range(5)), requests, seeds)
def test_the_order_of_arrival_does_not_change_the_bits(
    arrivals: list[int], setting: FoldSetting, seed: int
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
    with request_of([1, 1, 1], FoldSetting(up), seed) as request:
        slot = draw.draw(st.integers(0, 2))
        content = bytearray(request.updates[slot].path.read_bytes())
        place = draw.draw(st.integers(0, 8 * len(content) - 1))
        content[place // 8] ^= 1 << place % 8
        request.updates[slot].path.write_bytes(content)
        assert [each.index for each in fold(request).omitted] == [slot]
