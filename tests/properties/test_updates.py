"""Updates compressed and folded: bounds, order of arrival, bytes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.work.outer_step import PLAIN_STEP
from coordinator.shell.aggregation.fold import fold
from coordinator.shell.aggregation.fold_request import FoldRequest, FoldResult, StoredUpdate
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile import spec
from hypergpu.jobfile.spec import CODECS, Outer
from hypergpu.tensors.codec import (
    IncrementalCheck,
    codec_named,
    decode_parameters,
    encode_into_residual,
    encode_update,
)
from hypergpu.tensors.layout import (
    Flat,
    Float32s,
    Layout,
    Octets,
    TensorKind,
    TensorSpec,
    layout_of,
)
from hypergpu.tensors.records import GROUP, RECORD, Flaw
from hypergpu.tensors.topk import TopK, pack_places, unpack_places
from tests.unit.aggregation.fold_files import (
    LAYOUT,
    FoldSetting,
    first_request,
    model_of,
    next_request,
    updates_of,
)

BLOCKS = {"int8": RECORD, "int4": 256}
ERRORS = {"int8": 0.5 / 127, "int4": 0.5 / 7}

codecs = st.sampled_from(spec.CODECS)
sparse_codecs = st.sampled_from([name for name in spec.CODECS if codec_named(name).is_sparse])
counts = st.one_of(
    st.integers(1, 700),
    st.sampled_from([RECORD - 1, RECORD, RECORD + 1, GROUP, GROUP + 1, 9 * GROUP - 255]),
)


@st.composite
def vectors(draw: st.DrawFn) -> Float32s:
    """Long vectors from a seed, of mixed magnitudes, with hand-picked values among them."""
    count = draw(counts)
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    exponents = generator.uniform(-draw(st.integers(0, 30)), 5, count)
    values = (generator.standard_normal(count) * 10.0**exponents).astype(np.float32)
    picked_values = draw(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), max_size=8))
    places = generator.integers(0, count, len(picked_values))
    values[places] = picked_values
    return values


def encode(name: str, values: Float32s) -> Octets:
    payload = np.empty(codec_named(name).encoded_bytes(values.size), np.uint8)
    codec_named(name).encode(values, payload)
    return payload


def decode(name: str, payload: Octets, count: int) -> Float32s:
    out = np.empty(count, np.float32)
    codec_named(name).decode(payload, out)
    return out


def bound_of(name: str, values: Float32s) -> Float32s:
    """Largest error that the codec promises for each value."""
    if name == "fp32":
        return np.zeros_like(values)
    if name == "bf16":
        return np.abs(values) * np.float32(2**-8) + np.float32(2**-133)
    if codec_named(name).is_sparse:
        return sparse_bound_of(values)
    block = BLOCKS[name]
    padded_values = np.zeros(-(-values.size // block) * block, np.float32)
    padded_values[: values.size] = np.abs(values)
    largest = padded_values.reshape(-1, block).max(axis=1)
    # The bfloat16 scale of int4 may be 2**-8 wider; a scale below 2**-126 is dropped.
    bounds = np.maximum(largest * ERRORS[name] * (1 + 2**-8 + 2**-20), 128 * 2.0**-126)
    return np.repeat(bounds, block)[: values.size].astype(np.float32)


def records_of(values: Float32s) -> list[Float32s]:
    return [values[start : start + RECORD] for start in range(0, values.size, RECORD)]


def sparse_bound_of(values: Float32s) -> Float32s:
    """Omitted values err by their magnitude; sent ones lie within the record's magnitudes."""
    largest = [np.full(record.size, np.abs(record).max()) for record in records_of(values)]
    bound: Float32s = (np.concatenate(largest) * (1 + 2**-7) + 2.0**-120).astype(np.float32)
    return bound


@given(codecs, vectors())
def test_a_round_trip_stays_within_the_codec_s_bound(name: str, values: Float32s) -> None:
    error = np.abs(decode(name, encode(name, values), values.size) - values)
    assert (error <= bound_of(name, values)).all()


@given(codecs, vectors())
def test_what_is_finite_is_encoded_as_finite(name: str, values: Float32s) -> None:
    payload = encode(name, values)
    assert codec_named(name).flaw(payload, values.size) is None
    assert np.isfinite(decode(name, payload, values.size)).all()


@given(codecs, vectors(), st.integers(0, 2**32))
def test_payload_and_residual_are_the_values(name: str, values: Float32s, seed: int) -> None:
    noise = np.random.default_rng(seed).standard_normal(values.size, np.float32)
    residual = noise * np.float32(1e-3)
    codec, unsaid = codec_named(name), residual.copy()
    payload = np.empty(codec.encoded_bytes(values.size), np.uint8)
    encode_into_residual(codec, values, unsaid, payload)
    total = values + np.float32(codec.residual_decay) * residual
    sent_values = decode(name, payload, values.size)
    assert np.array_equal(payload, encode(name, total))
    assert np.array_equal(unsaid, total - sent_values)
    if name in BLOCKS:
        assert np.allclose(sent_values + unsaid, total, rtol=2**-23, atol=0)
    elif codec.is_sparse:
        assert (np.abs(sent_values + unsaid - total) <= np.abs(sent_values) * 2**-23).all()
    else:
        assert np.array_equal(sent_values + unsaid, total)


@given(codecs, vectors(), st.data())
def test_aligned_records_stand_alone(name: str, values: Float32s, draw: st.DataObject) -> None:
    codec = codec_named(name)
    records = -(-values.size // RECORD)
    first = draw.draw(st.integers(0, records - 1)) * RECORD
    last = min(draw.draw(st.integers(first // RECORD + 1, records)) * RECORD, values.size)
    there = slice(codec.encoded_bytes(first), codec.encoded_bytes(last))
    payload = encode(name, values)
    assert np.array_equal(payload[there], encode(name, values[first:last]))
    whole = decode(name, payload, values.size)
    assert np.array_equal(decode(name, payload[there], last - first), whole[first:last])


@st.composite
def many_ties(draw: st.DrawFn) -> Float32s:
    """Few different magnitudes, so that the largest are not one set."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = generator.integers(-draw(st.integers(0, 40)), 3, draw(counts))
    return values.astype(np.float32)


@given(sparse_codecs, st.one_of(vectors(), many_ties()))
def test_a_sparse_record_says_its_largest_magnitudes_and_of_equal_ones_the_first(
    name: str, values: Float32s
) -> None:
    codec = sparse_named(name)
    payload = encode(name, values)
    expected_places = [
        start + np.sort(np.argsort(-np.abs(record), kind="stable")[: said_of(name, record.size)])
        for start, record in zip(range(0, values.size, RECORD), records_of(values), strict=True)
    ]
    entries = codec.entries(payload, values.size)
    assert np.array_equal(entries.places, np.concatenate(expected_places))
    dense = decode(name, payload, values.size)
    assert np.array_equal(dense[entries.places], entries.values)
    assert np.count_nonzero(dense) == np.count_nonzero(entries.values)


@given(sparse_codecs, vectors(), st.data())
def test_a_place_that_does_not_ascend_is_a_flaw(
    name: str, values: Float32s, draw: st.DataObject
) -> None:
    payload = encode(name, values)
    records = [payload] if values.size < RECORD else np.split(payload, [record_bytes(name)])
    record, length = records[0], min(values.size, RECORD)
    sent_count = said_of(name, length)
    places = unpack_places(record[None, 4 : 4 + -(-3 * sent_count // 2)], sent_count)[0]
    place = draw.draw(st.integers(0, sent_count - 1))
    lowest_refused = length if place == sent_count - 1 else int(places[place + 1])
    places[place] = draw.draw(st.integers(lowest_refused, max(lowest_refused, RECORD - 1)))
    if places[place] < RECORD:
        pack_places(places[None], record[None, 4 : 4 + -(-3 * sent_count // 2)])
        assert codec_named(name).flaw(payload, values.size) is Flaw.MALFORMED


@given(sparse_codecs, vectors(), st.integers(0, 2**32))
def test_entries_of_any_bytes_stay_within_the_vector(
    name: str, values: Float32s, seed: int
) -> None:
    payload = np.frombuffer(np.random.default_rng(seed).bytes(encode(name, values).size), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        entries = sparse_named(name).entries(payload, values.size)
        assert decode(name, payload, values.size).size == values.size
    assert 0 <= entries.places.min() <= entries.places.max() < values.size


def sparse_named(name: str) -> TopK:
    codec = codec_named(name)
    assert isinstance(codec, TopK)
    return codec


def record_bytes(name: str) -> int:
    return codec_named(name).encoded_bytes(RECORD)


def said_of(name: str, length: int) -> int:
    return -(-length * int(name.removeprefix("topk")) // RECORD)


def small_layout(large_count: int, small_count: int) -> Layout:
    return layout_of(
        (
            TensorSpec("large", (RECORD + large_count,)),
            TensorSpec("small", (small_count,)),
            TensorSpec("statistic", (3,), TensorKind.STATISTIC),
            TensorSpec("integer", (), TensorKind.INTEGER),
        )
    )


def random_update(layout: Layout, seed: int) -> Flat:
    generator = np.random.default_rng(seed)
    return Flat(
        generator.standard_normal(layout.parameters_count, np.float32),
        generator.standard_normal(layout.statistics_count, np.float32),
        generator.integers(0, 9, layout.integers_count),
    )


layouts = st.builds(small_layout, st.integers(0, 9000), st.integers(0, RECORD - 1))


def verdict(layout: Layout, codec: str, pieces: list[bytes]) -> Reason | None:
    check = IncrementalCheck(layout, codec)
    try:
        for piece in pieces:
            check.feed(piece)
        check.finish()
    except HyperGPUError as error:
        return error.reason
    return None


def cut(content: bytes, ends: list[int]) -> list[bytes]:
    places = [0, *sorted(end % (len(content) + 1) for end in ends), len(content)]
    return [content[start:end] for start, end in pairwise(places)]


@given(layouts, codecs, st.lists(st.integers(0, 2**20), max_size=40), st.data())
def test_the_check_finds_a_bad_value_however_the_bytes_are_cut(
    layout: Layout, codec: str, ends: list[int], draw: st.DataObject
) -> None:
    sent_update = random_update(layout, 0)
    pieces = cut(encode_update(layout, codec, sent_update).payload.tobytes(), ends)
    assert verdict(layout, codec, pieces) is None
    both = np.concatenate((sent_update.parameters, sent_update.statistics))
    both[draw.draw(st.integers(0, both.size - 1))] = np.inf
    count = layout.parameters_count
    broken_update = encode_update(
        layout, codec, Flat(both[:count], both[count:], sent_update.integers)
    )
    pieces = cut(broken_update.payload.tobytes(), ends)
    assert verdict(layout, codec, pieces) is Reason.UPDATE_NOT_FINITE


@given(layouts, codecs, st.lists(st.integers(0, 2**20), max_size=9), st.integers(0, 2**32))
def test_what_the_check_lets_pass_decodes_to_finite_numbers(
    layout: Layout, codec: str, ends: list[int], seed: int
) -> None:
    sent_payload = encode_update(layout, codec, random_update(layout, 0)).payload
    generator = np.random.default_rng(seed)
    places = generator.integers(0, sent_payload.size, 64)
    sent_payload[places] = generator.integers(0, 256, 64)
    if verdict(layout, codec, cut(sent_payload.tobytes(), ends)) is None:
        assert np.isfinite(decode_parameters(layout, codec, sent_payload)).all()


Float64s = npt.NDArray[np.float64]

folded_codecs = st.sampled_from(CODECS)
dense = st.sampled_from([name for name in CODECS if not codec_named(name).is_sparse])
sparse = st.sampled_from([name for name in CODECS if codec_named(name).is_sparse])
dense_mixes = st.tuples(dense, dense)
mixes = st.tuples(folded_codecs, folded_codecs, folded_codecs)
momenta = st.sampled_from([0.0, 0.5, 0.9])
folded_counts = st.lists(st.integers(1, 10_000), min_size=1, max_size=5)
seeds = st.integers(0, 2**31)
outers = st.one_of(st.builds(Outer, st.sampled_from([0.3, 0.7, 1.0]), momenta), st.just(PLAIN_STEP))
requests = st.builds(FoldSetting, mixes, folded_codecs, outers)


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
        sent_change = Flat(self.exact - self.held, statistics, integers)
        if request.down == "fp32":
            self.held = self.exact
        else:
            # Error feedback is implicit: what is not said stays in the difference.
            self.held = self.exact - encode_update(LAYOUT, request.down, sent_change).residual
        return Flat(self.held, statistics, integers)


def mean_over_senders(request: FoldRequest) -> Float64s:
    """What the contract says of parameters, coordinate by coordinate in float64."""
    total = np.zeros(LAYOUT.parameters_count)
    weights, senders = np.zeros_like(total), np.zeros_like(total)
    for update, flat in zip(request.updates, updates_of(request), strict=True):
        codec, has_sent = codec_named(update.codec), np.ones(total.size, np.bool_)
        if isinstance(codec, TopK):
            has_sent[: LAYOUT.large_count] = False
            payload = np.fromfile(update.path, np.uint8)
            has_sent[codec.entries(payload, LAYOUT.large_count).places] = True
        total += update.weight * flat.parameters.astype(np.float64)
        weights += update.weight * has_sent
        senders += has_sent
    total /= np.maximum(weights, 1)
    is_mixed = any(codec_named(update.codec).is_sparse for update in request.updates)
    if is_mixed and len(request.updates) > 1:
        total[senders == 1] /= 2
    return total


@settings(max_examples=60)
@given(folded_counts, mixes, sparse, st.sampled_from([1.0, 0.25, 3.0]), seeds)
def test_sparse_updates_are_averaged_over_those_who_sent_a_coordinate(
    samples: list[int], mix: tuple[str, ...], last: str, scale: float, seed: int
) -> None:
    setting = FoldSetting((*mix, last), "fp32", PLAIN_STEP)
    with request_of(samples, setting, seed) as first:
        request = msgspec.structs.replace(first, scale=scale)
        start = model_of(request.base_model.path).parameters
        model = model_of(fold(request).model.path)
        expected_parameters = start - scale * mean_over_senders(request)
        assert np.allclose(model.parameters, expected_parameters, rtol=1e-6, atol=1e-7)
        statistics = weighted_mean(request, [flat.statistics for flat in updates_of(request)])
        assert np.array_equal(model.statistics, statistics)


@settings(max_examples=30)
@given(folded_counts, mixes, sparse, st.sampled_from([Outer(), PLAIN_STEP]), seeds)
def test_a_sparse_downlink_says_the_largest_of_what_nodes_lack_and_keeps_the_rest(
    samples: list[int], ups: tuple[str, ...], down: str, outer: Outer, seed: int
) -> None:
    with request_of(samples, FoldSetting(ups, down, outer), seed) as first:
        request = first
        for _ in range(2):
            result = fold(request)
            assert result.outer_state is not None
            assert result.delta is not None
            held_parameters = model_of(request.base_model.path).parameters
            exact = np.fromfile(result.outer_state.path, np.float32, LAYOUT.parameters_count)
            model = model_of(result.model.path)
            missing_change = Flat(exact - held_parameters, model.statistics, model.integers)
            expected_payload = encode_update(LAYOUT, down, missing_change).payload
            assert result.delta.path.read_bytes() == expected_payload.tobytes()
            sent_values = decode_parameters(LAYOUT, down, expected_payload)
            assert np.array_equal(model.parameters, held_parameters + sent_values)
            request = next_request(request, result)


def weighted_mean(request: FoldRequest, vectors: list[Float32s]) -> Float32s:
    samples = [update.weight for update in request.updates]
    weights = [np.float32(count / sum(samples)) for count in samples]
    total = weights[0] * vectors[0]
    for weight, vector in zip(weights[1:], vectors[1:], strict=True):
        total = total + weight * vector
    return total


@settings(max_examples=40)
@given(folded_counts, st.builds(FoldSetting, dense_mixes, st.just("fp32"), outers), seeds)
def test_a_fold_has_the_bits_of_whole_array_arithmetic(
    samples: list[int], setting: FoldSetting, seed: int
) -> None:
    with request_of(samples, setting, seed) as first:
        request = first
        reference = Reference(request)
        for _ in range(3):
            result = fold(request)
            expected_model = reference.step(request)
            assert bytes_of(model_of(result.model.path)) == bytes_of(expected_model)
            request = next_request(request, result)


@settings(max_examples=40)
@given(folded_counts, st.builds(FoldSetting, dense_mixes, dense, outers), seeds)
def test_a_compressed_downlink_follows_whole_array_arithmetic(
    samples: list[int], setting: FoldSetting, seed: int
) -> None:
    with request_of(samples, setting, seed) as first:
        request = first
        reference = Reference(request)
        for _ in range(2):
            result = fold(request)
            expected_parameters = reference.step(request).parameters
            held_parameters = model_of(result.model.path).parameters
            assert np.allclose(held_parameters, expected_parameters, rtol=1e-6, atol=1e-7)
            request = next_request(request, result)


@settings(max_examples=30)
@given(folded_counts, requests, seeds, st.integers(1, 9))
def test_the_span_does_not_change_the_bits(
    samples: list[int], setting: FoldSetting, seed: int, records: int
) -> None:
    with request_of(samples, setting, seed) as first:
        request = first
        for _ in range(2):
            result = fold(request)
            other = fold(request, span=records * RECORD)
            assert digests(other) == digests(result)
            request = next_request(request, result)


def digests(result: FoldResult) -> list[str]:
    return [file.digest for file in result.files]


@settings(max_examples=20)
@given(st.permutations(range(5)), requests, seeds)
def test_the_order_of_arrival_does_not_change_the_bits(
    arrivals: list[int], setting: FoldSetting, seed: int
) -> None:
    with request_of([5, 4, 3, 2, 1], setting, seed) as request:
        expected_digests = digests(fold(request))
        contents = [update.path.read_bytes() for update in request.updates]
        late: dict[int, StoredUpdate] = {}
        for slot in arrivals:
            path = request.output_dir / f"arrived-{len(late)}"
            path.write_bytes(contents[slot])
            late[slot] = msgspec.structs.replace(request.updates[slot], path=path)
        in_slot_order = tuple(late[slot] for slot in sorted(late))
        assert (
            digests(fold(msgspec.structs.replace(request, updates=in_slot_order)))
            == expected_digests
        )


@settings(max_examples=40)
@given(folded_codecs, seeds, st.data())
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
