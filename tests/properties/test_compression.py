from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile import spec
from hypergpu.tensors.codec import (
    IncrementalCheck,
    decode_parameters,
    encode_update,
)
from hypergpu.tensors.compression import (
    GROUP,
    RECORD,
    Flaw,
    TopK,
    encode_into_residual,
    scheme_named,
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
from hypergpu.tensors.topk import pack_places, unpack_places

BLOCKS = {"int8": RECORD, "int4": 256}
ERRORS = {"int8": 0.5 / 127, "int4": 0.5 / 7}

schemes = st.sampled_from(spec.SCHEMES)
sparse_schemes = st.sampled_from([name for name in spec.SCHEMES if scheme_named(name).is_sparse])
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
    picked = draw(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), max_size=8))
    places = generator.integers(0, count, len(picked))
    values[places] = picked
    return values


def encode(name: str, values: Float32s) -> Octets:
    payload = np.empty(scheme_named(name).encoded_bytes(values.size), np.uint8)
    scheme_named(name).encode(values, payload)
    return payload


def decode(name: str, payload: Octets, count: int) -> Float32s:
    out = np.empty(count, np.float32)
    scheme_named(name).decode(payload, out)
    return out


def bound_of(name: str, values: Float32s) -> Float32s:
    """Largest error that the scheme promises for each value."""
    if name == "fp32":
        return np.zeros_like(values)
    if name == "bf16":
        return np.abs(values) * np.float32(2**-8) + np.float32(2**-133)
    if scheme_named(name).is_sparse:
        return sparse_bound_of(values)
    block = BLOCKS[name]
    padded = np.zeros(-(-values.size // block) * block, np.float32)
    padded[: values.size] = np.abs(values)
    largest = padded.reshape(-1, block).max(axis=1)
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


@given(schemes, vectors())
def test_a_round_trip_stays_within_the_scheme_s_bound(name: str, values: Float32s) -> None:
    error = np.abs(decode(name, encode(name, values), values.size) - values)
    assert (error <= bound_of(name, values)).all()


@given(schemes, vectors())
def test_what_is_finite_is_encoded_as_finite(name: str, values: Float32s) -> None:
    payload = encode(name, values)
    assert scheme_named(name).flaw(payload, values.size) is None
    assert np.isfinite(decode(name, payload, values.size)).all()


@given(schemes, vectors(), st.integers(0, 2**32))
def test_payload_and_residual_are_the_values(name: str, values: Float32s, seed: int) -> None:
    noise = np.random.default_rng(seed).standard_normal(values.size, np.float32)
    residual = noise * np.float32(1e-3)
    scheme, unsaid = scheme_named(name), residual.copy()
    payload = np.empty(scheme.encoded_bytes(values.size), np.uint8)
    encode_into_residual(scheme, values, unsaid, payload)
    total = values + np.float32(scheme.residual_decay) * residual
    said = decode(name, payload, values.size)
    assert np.array_equal(payload, encode(name, total))
    assert np.array_equal(unsaid, total - said)
    if name in BLOCKS:
        assert np.allclose(said + unsaid, total, rtol=2**-23, atol=0)
    elif scheme.is_sparse:
        assert (np.abs(said + unsaid - total) <= np.abs(said) * 2**-23).all()
    else:
        assert np.array_equal(said + unsaid, total)


@given(schemes, vectors(), st.data())
def test_aligned_records_stand_alone(name: str, values: Float32s, draw: st.DataObject) -> None:
    scheme = scheme_named(name)
    records = -(-values.size // RECORD)
    first = draw.draw(st.integers(0, records - 1)) * RECORD
    last = min(draw.draw(st.integers(first // RECORD + 1, records)) * RECORD, values.size)
    there = slice(scheme.encoded_bytes(first), scheme.encoded_bytes(last))
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


@given(sparse_schemes, st.one_of(vectors(), many_ties()))
def test_a_sparse_record_says_its_largest_magnitudes_and_of_equal_ones_the_first(
    name: str, values: Float32s
) -> None:
    scheme = sparse_named(name)
    payload = encode(name, values)
    expected = [
        start + np.sort(np.argsort(-np.abs(record), kind="stable")[: said_of(name, record.size)])
        for start, record in zip(range(0, values.size, RECORD), records_of(values), strict=True)
    ]
    entries = scheme.entries(payload, values.size)
    assert np.array_equal(entries.places, np.concatenate(expected))
    dense = decode(name, payload, values.size)
    assert np.array_equal(dense[entries.places], entries.values)
    assert np.count_nonzero(dense) == np.count_nonzero(entries.values)


@given(sparse_schemes, vectors(), st.data())
def test_a_place_that_does_not_ascend_is_a_flaw(
    name: str, values: Float32s, draw: st.DataObject
) -> None:
    payload = encode(name, values)
    records = [payload] if values.size < RECORD else np.split(payload, [record_bytes(name)])
    record, length = records[0], min(values.size, RECORD)
    said = said_of(name, length)
    places = unpack_places(record[None, 4 : 4 + -(-3 * said // 2)], said)[0]
    place = draw.draw(st.integers(0, said - 1))
    lowest_refused = length if place == said - 1 else int(places[place + 1])
    places[place] = draw.draw(st.integers(lowest_refused, max(lowest_refused, RECORD - 1)))
    if places[place] < RECORD:
        pack_places(places[None], record[None, 4 : 4 + -(-3 * said // 2)])
        assert scheme_named(name).flaw(payload, values.size) is Flaw.MALFORMED


@given(sparse_schemes, vectors(), st.integers(0, 2**32))
def test_entries_of_any_bytes_stay_within_the_vector(
    name: str, values: Float32s, seed: int
) -> None:
    payload = np.frombuffer(np.random.default_rng(seed).bytes(encode(name, values).size), np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        entries = sparse_named(name).entries(payload, values.size)
        assert decode(name, payload, values.size).size == values.size
    assert 0 <= entries.places.min() <= entries.places.max() < values.size


def sparse_named(name: str) -> TopK:
    scheme = scheme_named(name)
    assert isinstance(scheme, TopK)
    return scheme


def record_bytes(name: str) -> int:
    return scheme_named(name).encoded_bytes(RECORD)


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


def verdict(layout: Layout, scheme: str, pieces: list[bytes]) -> Reason | None:
    check = IncrementalCheck(layout, scheme)
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


@given(layouts, schemes, st.lists(st.integers(0, 2**20), max_size=40), st.data())
def test_the_check_finds_a_bad_value_however_the_bytes_are_cut(
    layout: Layout, scheme: str, ends: list[int], draw: st.DataObject
) -> None:
    sent = random_update(layout, 0)
    pieces = cut(encode_update(layout, scheme, sent).payload.tobytes(), ends)
    assert verdict(layout, scheme, pieces) is None
    both = np.concatenate((sent.parameters, sent.statistics))
    both[draw.draw(st.integers(0, both.size - 1))] = np.inf
    count = layout.parameters_count
    broken = encode_update(layout, scheme, Flat(both[:count], both[count:], sent.integers))
    pieces = cut(broken.payload.tobytes(), ends)
    assert verdict(layout, scheme, pieces) is Reason.UPDATE_NOT_FINITE


@given(layouts, schemes, st.lists(st.integers(0, 2**20), max_size=9), st.integers(0, 2**32))
def test_what_the_check_lets_pass_decodes_to_finite_numbers(
    layout: Layout, scheme: str, ends: list[int], seed: int
) -> None:
    sent = encode_update(layout, scheme, random_update(layout, 0)).payload
    generator = np.random.default_rng(seed)
    places = generator.integers(0, sent.size, 64)
    sent[places] = generator.integers(0, 256, 64)
    if verdict(layout, scheme, cut(sent.tobytes(), ends)) is None:
        assert np.isfinite(decode_parameters(layout, scheme, sent)).all()
