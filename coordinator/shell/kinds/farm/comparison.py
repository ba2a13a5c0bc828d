"""Compares results of one bundle, by the rule of its job. Reads blobs that nodes sent, which were
checked to be results before.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hypergpu.farm.bundle_results import (
    ItemResult,
    VectorResults,
    json_results,
    read_json_results,
    read_vector_results,
)
from hypergpu.farm.map_request import ComparisonRule, ResultComparison, ResultEncoding
from hypergpu.farm.picture_likeness import are_like_pictures

_PPM = 1_000_000
_PERMILLE = 1_000
_TOKEN_COUNTS = ("tokens", "prompt_tokens", "new_tokens")


def are_alike(
    one: bytes, other: bytes, encoding: ResultEncoding, items: int, comparison: ResultComparison
) -> bool:
    """Whether two results of the same items agree.

    Raises:
        HyperGPUError: REQUEST_INVALID, one of them is malformed.
    """
    if one == other or comparison.rule is ComparisonRule.EXACT:
        return one == other
    whole = ResultPart(0, items, items)
    pair = ComparedResult(one, whole), ComparedResult(other, whole)
    count = _agreeing_count(*pair, encoding, comparison)
    return count * _PERMILLE >= items * comparison.agreeing_permille


class ResultPart(NamedTuple):
    """Some items of a result that lie side by side."""

    first: int
    """Place of the first one in the result."""
    items: int
    result_items: int
    """Items of the whole result."""

    @property
    def places(self) -> slice:
        """Places of the items in the result."""
        return slice(self.first, self.first + self.items)


class ComparedResult(NamedTuple):
    """A result and the part of it that is compared."""

    content: bytes
    part: ResultPart

    @property
    def lines(self) -> list[ItemResult]:
        """Results of the part's items, of one in JSON lines.

        Raises:
            HyperGPUError: REQUEST_INVALID, the result is malformed.
        """
        return read_json_results(self.content, self.part.result_items)[self.part.places]


def are_parts_alike(
    one: ComparedResult,
    other: ComparedResult,
    encoding: ResultEncoding,
    comparison: ResultComparison,
) -> bool:
    """Whether the parts of two results agree. Where single items may differ by the rule, one may in
    every part of two or more: parts are small.

    Raises:
        HyperGPUError: REQUEST_INVALID, a result is malformed.
    """
    items = one.part.items
    tolerated_items = items * (_PERMILLE - comparison.agreeing_permille) // _PERMILLE
    if comparison.agreeing_permille < _PERMILLE and items > 1:
        tolerated_items = max(1, tolerated_items)
    return items - _agreeing_count(one, other, encoding, comparison) <= tolerated_items


def _agreeing_count(
    one: ComparedResult,
    other: ComparedResult,
    encoding: ResultEncoding,
    comparison: ResultComparison,
) -> int:
    if encoding is ResultEncoding.SAFETENSORS:
        return _agreeing_vectors(_vectors(one), _vectors(other), comparison)
    is_like = _COMPARED_PAIRS[comparison.rule]
    pairs = zip(one.lines, other.lines, strict=True)
    return sum(is_like(first, second, comparison) for first, second in pairs)


def _vectors(result: ComparedResult) -> VectorResults:
    part = result.part
    vectors = read_vector_results(result.content, part.result_items)
    errors = {
        place - part.first: reason
        for place, reason in vectors.errors.items()
        if 0 <= place - part.first < part.items
    }
    return VectorResults(vectors.values[part.places], errors)


def are_units_stated(content: bytes, items: int, units: int) -> bool:
    """Whether a result in JSON lines has as many tokens as its node states, where its values say
    how many they have.

    Raises:
        HyperGPUError: REQUEST_INVALID, the result is malformed.
    """
    values = [each.value for each in read_json_results(content, items) if not each.error]
    counts = [
        value[name]
        for value in values
        if isinstance(value, Mapping)
        for name in _TOKEN_COUNTS
        if isinstance(value.get(name), int)
    ]
    return not counts or sum(counts) == units


def _agreeing_vectors(
    one: VectorResults, other: VectorResults, comparison: ResultComparison
) -> int:
    if one.values.shape != other.values.shape:
        return 0
    items = len(one.values)
    if comparison.rule is ComparisonRule.EXACT:
        equal = np.all((one.values == other.values).reshape(items, -1), axis=1)
        return int(np.sum(equal)) if one.errors == other.errors else 0
    first = one.values.reshape(items, -1).astype(np.float64)
    second = other.values.reshape(items, -1).astype(np.float64)
    failed_rows = np.zeros(items, bool)
    unequal = np.zeros(items, bool)
    for place in {*one.errors, *other.errors}:
        failed_rows[place] = True
        unequal[place] = (place in one.errors) is not (place in other.errors)
    if first.shape[1] == 1:
        is_near = _near_numbers(first[:, 0], second[:, 0], comparison.relative_error_ppm)
    else:
        is_near = _near_vectors(first, second, comparison)
    return int(np.sum(np.where(failed_rows, ~unequal, is_near)))


def _near_numbers(first: Any, second: Any, error_ppm: int) -> Any:
    largest = np.maximum(np.abs(first), np.abs(second))
    is_near = np.abs(first - second) * _PPM <= error_ppm * largest
    return is_near & np.isfinite(first) & np.isfinite(second)


def _near_vectors(first: Any, second: Any, comparison: ResultComparison) -> Any:
    """Rows of alike direction, whose lengths are alike as single numbers are."""
    lengths = np.linalg.norm(first, axis=1), np.linalg.norm(second, axis=1)
    products = np.sum(first * second, axis=1)
    distance = lengths[0] * lengths[1] - products
    is_near = distance * _PPM <= comparison.cosine_distance_ppm * lengths[0] * lengths[1]
    return is_near & _near_numbers(*lengths, comparison.relative_error_ppm)


def _is_equal(one: ItemResult, other: ItemResult, _comparison: ResultComparison) -> bool:
    """Whether two values are the same; two items that both failed are alike, too."""
    if one.error or other.error:
        return bool(one.error) is bool(other.error)
    return bool(json_results([one]) == json_results([other]))


def _is_like(one: ItemResult, other: ItemResult, comparison: ResultComparison) -> bool:
    """Whether two values are alike; two items that both failed are, whatever their reasons."""
    if one.error or other.error:
        return bool(one.error) is bool(other.error)
    try:
        return _is_like_value(one.value, other.value, comparison)
    except (OverflowError, RecursionError):
        # Numbers and depths that no honest work gives, and a node may send.
        return False


def _is_like_picture(one: ItemResult, other: ItemResult, _comparison: ResultComparison) -> bool:
    """Whether two pictures look alike; two items that both failed are alike, too."""
    if one.error or other.error:
        return bool(one.error) is bool(other.error)
    return are_like_pictures(one.value, other.value)


_COMPARED_PAIRS = {
    ComparisonRule.EXACT: _is_equal,
    ComparisonRule.TOLERANCE: _is_like,
    ComparisonRule.PICTURES: _is_like_picture,
}


def _is_like_value(one: Any, other: Any, comparison: ResultComparison) -> bool:
    if _is_number(one) and _is_number(other):
        return bool(_near_numbers(float(one), float(other), comparison.relative_error_ppm))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(
            _is_like_value(value, other[key], comparison) for key, value in one.items()
        )
    if isinstance(one, list) and isinstance(other, list):
        return _are_like_lists(one, other, comparison)
    return type(one) is type(other) and bool(one == other)


def _are_like_lists(one: Sequence[Any], other: Sequence[Any], comparison: ResultComparison) -> bool:
    if len(one) != len(other):
        return False
    if len(one) > 1 and all(map(_is_number, (*one, *other))):
        rows = np.array([one], np.float64), np.array([other], np.float64)
        return bool(_near_vectors(*rows, comparison)[0])
    pairs = zip(one, other, strict=True)
    return all(_is_like_value(first, second, comparison) for first, second in pairs)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
