"""What travels of a farm job: inputs, results, units, and when two results are alike."""

from fractions import Fraction

import msgspec
import numpy as np
import pytest

from coordinator.shell.kinds.farm.admission import bundle_items_most
from coordinator.shell.kinds.farm.comparison import are_alike
from coordinator.shell.kinds.farm.runtime import InputChunks
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundle_results import (
    ItemResult,
    VectorResults,
    failure_count,
    json_results,
    read_json_results,
    read_vector_results,
    vector_results,
)
from hypergpu.farm.bundles import BUNDLE_CHUNKS_MOST
from hypergpu.farm.item_chunks import (
    CHUNK_BYTES_MOST,
    MANIFEST_BYTES_MOST,
    ItemChunk,
    ItemEncoding,
    ItemManifest,
    manifest_bytes,
    read_json_lines,
    read_manifest,
)
from hypergpu.farm.map_request import ComparisonRule, ResultComparison, ResultEncoding
from hypergpu.units import Bytes
from hypergpu.work_units import WorkUnit, whole_units

JSONL, SAFETENSORS = ResultEncoding.JSONL, ResultEncoding.SAFETENSORS
TOLERANT = ResultComparison(rule=ComparisonRule.TOLERANCE)


def manifest_of(*items: int, size_bytes: int = 100) -> ItemManifest:
    """A manifest of chunks with so many items."""
    chunks = tuple(
        ItemChunk(digest_of(f"chunk {number}".encode()), Bytes(size_bytes), count)
        for number, count in enumerate(items)
    )
    return ItemManifest(encoding=ItemEncoding.JSONL, chunks=chunks)


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = manifest_of(3, 1, 4)
    assert read_manifest(manifest_bytes(manifest)) == manifest
    assert manifest.items == 8


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (bytes(MANIFEST_BYTES_MOST + 1), "bytes, and"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode(manifest_of()), "0 chunks"),
        (msgspec.msgpack.encode(manifest_of(0)), "0 items"),
        (msgspec.msgpack.encode(manifest_of(1, size_bytes=CHUNK_BYTES_MOST + 1)), "divide it"),
        (
            msgspec.msgpack.encode({"encoding": "jsonl", "chunks": [["../x", 1, 1]]}),
            "no digest for a name",
        ),
    ],
)
def test_a_manifest_that_is_none_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    with pytest.raises(HyperGPUError, match=reason):
        read_manifest(content)


def test_a_chunk_of_another_number_of_items_is_refused() -> None:
    assert list(read_json_lines(b'"a"\nnot json\n', 2)) == [b'"a"', b"not json"]
    with pytest.raises(HyperGPUError, match="2 lines, and 3 items"):
        read_json_lines(b'"a"\n"b"\n', 3)


def test_a_bundle_gets_the_chunks_that_cover_it() -> None:
    chunks = InputChunks(manifest_of(3, 1, 4))
    assert [(each.start, each.items) for each in chunks.covering(2, 3)] == [(0, 3), (3, 1), (4, 4)]
    assert [(each.start, each.items) for each in chunks.covering(3, 1)] == [(3, 1)]
    assert [(each.start, each.items) for each in chunks.covering(4, 4)] == [(4, 4)]


def test_no_bundle_touches_more_chunks_than_it_may() -> None:
    counts = [1 + number * 7 % 11 for number in range(60)]
    most_items = bundle_items_most(manifest_of(*counts))
    chunks = InputChunks(manifest_of(*counts))
    touched_counts = [
        len(chunks.covering(start, most_items)) for start in range(sum(counts) - most_items + 1)
    ]
    assert max(touched_counts) == BUNDLE_CHUNKS_MOST
    assert bundle_items_most(manifest_of(5, 5)) == 10


def test_results_are_read_as_they_were_written_and_alike_values_give_equal_bytes() -> None:
    results = [ItemResult(value={"b": 1, "a": [2]}), ItemResult(error="too long")]
    content = json_results(results)
    assert read_json_results(content, 2) == results
    assert content == json_results([ItemResult(value={"a": [2], "b": 1}), results[1]])
    assert failure_count(content, JSONL, 2) == 1
    vectors = VectorResults(np.ones((3, 2), np.float32), {1: "too long"})
    content = vector_results(vectors)
    again = read_vector_results(content, 3)
    assert again.errors == {1: "too long"}
    assert again.values.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert failure_count(content, SAFETENSORS, 3) == 1


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, (1 << 40).to_bytes(8, "little"), b"\2\0\0\0\0\0\0\0{}"]
)
def test_bytes_that_are_no_result_are_refused(content: bytes) -> None:
    for encoding in ResultEncoding:
        with pytest.raises(HyperGPUError, match="the result of a bundle is malformed"):
            failure_count(content, encoding, 3)


def test_exact_results_agree_byte_by_byte() -> None:
    one, other = (json_results([ItemResult(value=value)]) for value in (1.0, 1.0000001))
    assert are_alike(one, one, JSONL, 1, ResultComparison())
    assert not are_alike(one, other, JSONL, 1, ResultComparison())
    assert are_alike(one, other, JSONL, 1, TOLERANT)


def value_in_lists(depth: int, value: object) -> object:
    """A value in so many lists."""
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("first", "second", "is_alike"),
    [
        (1.0, 1.009, True),
        (1.0, 1.02, False),
        ("text", "text", True),
        ("text", "other", False),
        (1, "1", False),
        (True, 1, False),
        ({"loss": 2.0, "label": "a"}, {"loss": 2.001, "label": "a"}, True),
        ({"loss": 2.0, "label": "a"}, {"loss": 2.001, "label": "b"}, False),
        ([1.0, 0.0], [1.0, 0.01], True),
        ([1.0, 0.0], [0.0, 1.0], False),
        ([1.0, 0.0], [2.0, 0.0], False),
        (float(10**300), -float(10**300), False),
        (1.0, 10**400, False),
        ([1.0, 2.0], [1.0, 10**400], False),
        (value_in_lists(900, 1), value_in_lists(900, 2), False),
    ],
)
def test_values_are_alike_within_the_tolerance(
    first: object, second: object, *, is_alike: bool
) -> None:
    one, other = (json_results([ItemResult(value=value)]) for value in (first, second))
    assert are_alike(one, other, JSONL, 1, TOLERANT) is is_alike


def test_vectors_are_alike_by_direction_and_length_of_as_many_items_as_stated() -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(size=(100, 16)).astype(np.float32)
    near = values + 1e-4 * generator.normal(size=values.shape).astype(np.float32)
    wrong = near.copy()
    wrong[:2] = -wrong[:2]
    one, other, third = (vector_results(VectorResults(each, {})) for each in (values, near, wrong))
    assert are_alike(one, other, SAFETENSORS, 100, TOLERANT)
    assert not are_alike(one, third, SAFETENSORS, 100, TOLERANT)
    lenient = msgspec.structs.replace(TOLERANT, agreeing_permille=980)
    assert are_alike(one, third, SAFETENSORS, 100, lenient)
    failed_item = vector_results(VectorResults(values, {0: "no"}))
    assert not are_alike(one, failed_item, SAFETENSORS, 100, TOLERANT)


def test_units_are_whole_rounded_up_once_and_never_zero() -> None:
    assert whole_units(Fraction(1, 3)) == 1
    assert whole_units(sum([Fraction(1, 3)] * 3, Fraction(0))) == 1
    assert whole_units(Fraction(10, 3)) == 4
    for amount in (0, -1, 1 << 48):
        with pytest.raises(HyperGPUError, match="units of work"):
            whole_units(amount)
    assert {unit.value for unit in WorkUnit} == {
        *("samples", "items", "tokens", "megapixel-steps", "layer-tokens"),
    }
