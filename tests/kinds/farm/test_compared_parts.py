"""A part of a result is compared with another node's result of the same items."""

import numpy as np
import pytest

from coordinator.shell.kinds.farm.comparison import (
    ComparedResult,
    ResultPart,
    are_parts_alike,
    are_units_stated,
)
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundle_results import ItemResult, VectorResults, json_results, vector_results
from hypergpu.farm.map_request import ComparisonRule, ResultComparison, ResultEncoding

EXACT = ResultComparison()
NUMBERS = ResultComparison(ComparisonRule.TOLERANCE, agreeing_permille=990)
JSONL, SAFETENSORS = ResultEncoding.JSONL, ResultEncoding.SAFETENSORS
FIRST, PART_ITEMS, ITEMS = 3, 2, 8


def lines(*values: object) -> bytes:
    """A result in JSON lines; a value that is an exception is an item's reason."""
    return json_results(
        [
            ItemResult(error=str(value))
            if isinstance(value, Exception)
            else ItemResult(value=value)
            for value in values
        ]
    )


def is_part_of(
    whole: bytes, part: bytes, comparison: ResultComparison, encoding: ResultEncoding = JSONL
) -> bool:
    """Whether a vote on items 3 and 4 agrees with a result of eight."""
    return are_parts_alike(
        ComparedResult(whole, ResultPart(FIRST, PART_ITEMS, ITEMS)),
        ComparedResult(part, ResultPart(0, PART_ITEMS, PART_ITEMS)),
        encoding,
        comparison,
    )


def test_values_of_the_part_decide_and_no_others() -> None:
    whole = lines(*("wrong" for _ in range(FIRST)), "d", "e", "wrong", "wrong", "wrong")
    assert is_part_of(whole, lines("d", "e"), EXACT)
    assert not is_part_of(whole, lines("d", "f"), EXACT)
    assert not is_part_of(whole, lines("e", "d"), EXACT)


def test_items_that_failed_at_both_nodes_agree_whatever_their_reasons() -> None:
    whole = lines(0, 1, 2, ValueError("too long"), 4, 5, 6, 7)
    assert is_part_of(whole, lines(ValueError("too many tokens"), 4), EXACT)
    assert not is_part_of(whole, lines(3, 4), EXACT)


def test_where_single_items_may_differ_one_of_a_part_may() -> None:
    whole = lines(*(float(place) for place in range(ITEMS)))
    assert is_part_of(whole, lines(3.0, 4.9), NUMBERS)
    assert not is_part_of(whole, lines(3.9, 4.9), NUMBERS)
    strict = ResultComparison(ComparisonRule.TOLERANCE)
    assert is_part_of(whole, lines(3.0, 4.01), strict)
    assert not is_part_of(whole, lines(3.0, 4.9), strict)


@pytest.mark.parametrize("comparison", [EXACT, ResultComparison(ComparisonRule.TOLERANCE)])
def test_rows_of_vectors_are_compared_with_their_own_reasons(comparison: ResultComparison) -> None:
    values = np.random.default_rng(1).normal(size=(ITEMS, 4)).astype(np.float32)
    whole = vector_results(VectorResults(values, {0: "no text", 4: "no text"}))
    part = vector_results(VectorResults(values[FIRST : FIRST + PART_ITEMS], {1: "no text"}))
    assert is_part_of(whole, part, comparison, SAFETENSORS)
    other = vector_results(VectorResults(values[FIRST : FIRST + PART_ITEMS], {}))
    assert not is_part_of(whole, other, comparison, SAFETENSORS)
    wrong = vector_results(VectorResults(-values[FIRST : FIRST + PART_ITEMS], {1: "no text"}))
    assert not is_part_of(whole, wrong, comparison, SAFETENSORS)


def test_a_result_of_another_number_of_items_is_refused() -> None:
    with pytest.raises(HyperGPUError, match="7 lines for 8 items"):
        is_part_of(lines(*range(ITEMS - 1)), lines(3, 4), EXACT)


def test_tokens_that_a_node_states_are_those_of_its_values() -> None:
    scores = lines({"log_likelihood": -1.0, "tokens": 3}, ValueError("no text"))
    assert are_units_stated(scores, 2, 3)
    assert not are_units_stated(scores, 2, 4)
    texts = lines({"text": "a", "prompt_tokens": 2, "new_tokens": 5})
    assert are_units_stated(texts, 1, 7)
    assert not are_units_stated(texts, 1, 70)
    assert are_units_stated(lines(1, 2), 2, 50)
