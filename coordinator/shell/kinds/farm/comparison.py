"""Compares results of one bundle, by the rule of its job. Reads blobs that nodes sent, which were
checked to be results before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hypergpu.farm.bundle_results import (
    ItemResult,
    VectorResults,
    read_json_results,
    read_vector_results,
)
from hypergpu.farm.map_request import ComparisonRule, ResultComparison, ResultEncoding
from hypergpu.farm.picture_likeness import are_like_pictures

_PPM = 1_000_000
_PERMILLE = 1_000


def are_alike(
    one: bytes, other: bytes, encoding: ResultEncoding, items: int, comparison: ResultComparison
) -> bool:
    """Whether two results of the same items agree.

    Raises:
        HyperGPUError: REQUEST_INVALID, one of them is malformed.
    """
    if one == other or comparison.rule is ComparisonRule.EXACT:
        return one == other
    if encoding is ResultEncoding.SAFETENSORS:
        count = _agreeing_vectors(
            read_vector_results(one, items), read_vector_results(other, items), comparison
        )
    else:
        is_like = _COMPARED_PAIRS[comparison.rule]
        pairs = zip(read_json_results(one, items), read_json_results(other, items), strict=True)
        count = sum(is_like(first, second, comparison) for first, second in pairs)
    return count * _PERMILLE >= items * comparison.agreeing_permille


def _agreeing_vectors(
    one: VectorResults, other: VectorResults, comparison: ResultComparison
) -> int:
    if one.values.shape != other.values.shape:
        return 0
    items = len(one.values)
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
