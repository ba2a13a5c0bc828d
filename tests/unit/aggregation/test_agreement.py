"""How far each update goes along with the others."""

import numpy as np
import pytest

from coordinator.shell.aggregation.agreement import Agreement
from hypergpu.tensors.compression import RECORD, scheme_named

FP32 = scheme_named("fp32")
VALUES = 40 * RECORD


def cosines(updates: list[np.ndarray], span: int = VALUES) -> list[float | None]:
    agreement = Agreement(len(updates), VALUES)
    for start in range(0, VALUES, span):
        stop = min(start + span, VALUES)
        for index, update in enumerate(updates):
            piece = update[start:stop].astype("<f4").view(np.uint8)
            agreement.add(index, FP32, piece, range(start, stop))
        agreement.end_span()
    return list(agreement.cosines())


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(VALUES).astype(np.float32)


def test_equal_updates_agree_wholly() -> None:
    assert cosines([noise(1)] * 3) == pytest.approx([1.0] * 3)


def test_updates_in_different_directions_agree_by_nothing() -> None:
    found = cosines([noise(seed) for seed in range(4)])
    assert all(abs(each or 1) < 0.05 for each in found)


def test_one_that_points_the_other_way_stands_out() -> None:
    one = noise(1)
    others = [one + 0.5 * noise(seed) for seed in range(2, 5)]
    *honest, turned = cosines([*others, -10 * one])
    assert turned is not None
    assert turned < -0.9
    assert all(each is not None and each > turned for each in honest)


def test_an_update_without_content_agrees_by_nothing() -> None:
    *_, nothing = cosines([noise(1), noise(1), np.zeros(VALUES, np.float32)])
    assert nothing == 0.0


def test_of_a_single_update_nothing_is_known() -> None:
    assert cosines([noise(1)]) == [None]


def test_where_the_others_say_nothing_nothing_is_known() -> None:
    first, second = cosines([noise(1), np.zeros(VALUES, np.float32)])
    assert (first, second) == (None, 0.0)


@pytest.mark.parametrize("span", [RECORD, 3 * RECORD, 8 * RECORD])
def test_the_span_does_not_matter(span: int) -> None:
    updates = [noise(seed) + noise(9) for seed in range(3)]
    assert cosines(updates, span) == cosines(updates)


def test_of_many_updates_only_some_values_are_kept() -> None:
    shared = noise(0)
    updates = [shared + noise(seed % 7 + 1) for seed in range(600)]
    found = cosines(updates)
    assert all(each is not None and 0.5 < each < 0.9 for each in found)
