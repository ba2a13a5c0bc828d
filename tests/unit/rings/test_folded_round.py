"""When a round of several rings is folded."""

import pytest
from msgspec.structs import replace

from coordinator.core.rings.folded_round import (
    LATE_MS_LEAST,
    OpenRound,
    fold_choice,
    with_finish,
    with_rings,
)
from hypergpu.units import Milliseconds

BEGAN_MS = Milliseconds(1_000)
ROUND = OpenRound(BEGAN_MS, frozenset({0, 1}))


def at(took_ms: int) -> Milliseconds:
    return Milliseconds(BEGAN_MS + took_ms)


def test_a_round_is_folded_once_every_ring_is_in_and_not_before() -> None:
    assert fold_choice(ROUND, at(10**9)) == ((), "waits for rings 1, 2", None)
    first = with_finish(ROUND, 1, at(40_000))
    choice = fold_choice(first, at(40_000))
    assert not choice.rings
    assert choice.reason == "waits for ring 1, 120 s at most"
    assert choice.look_ms == at(120_000)
    both = with_finish(first, 0, at(50_000))
    assert fold_choice(both, at(50_000)) == ((0, 1), "", None)


def test_a_late_ring_is_left_out_after_three_times_what_the_other_took_and_two_minutes() -> None:
    slow = with_finish(ROUND, 0, at(50_000))
    assert not fold_choice(slow, at(149_999)).rings
    late = fold_choice(slow, at(150_000))
    assert late.rings == (0,)
    assert late.reason == "ring 2: not in after 150 s, where 1 ring took 50.0 s"
    quick = with_finish(ROUND, 0, at(10))
    assert not fold_choice(quick, at(LATE_MS_LEAST - 1)).rings
    assert fold_choice(quick, at(LATE_MS_LEAST)).rings == (0,)


def test_half_of_the_rings_are_waited_for_however_long_it_takes() -> None:
    four = with_rings(ROUND, (2, 3))
    alone = with_finish(four, 2, at(40_000))
    assert fold_choice(alone, at(10**9)) == ((), "waits for rings 1, 2, 4", None)
    half = with_finish(alone, 0, at(100_000))
    assert not fold_choice(half, at(299_999)).rings
    assert fold_choice(half, at(300_000)).rings == (0, 2)


def test_a_ring_that_is_not_there_is_not_waited_for_and_one_that_comes_is() -> None:
    alone = replace(ROUND, rings=frozenset({0}))
    assert fold_choice(with_finish(alone, 0, at(5)), at(5)).rings == (0,)
    late_round = with_finish(with_rings(alone, (1,)), 0, at(5))
    assert not fold_choice(late_round, at(5)).rings


@pytest.mark.parametrize("again_ms", [60_000, 80_000])
def test_a_ring_that_is_through_twice_is_as_quick_as_the_first_time(again_ms: int) -> None:
    once = with_finish(ROUND, 0, at(50_000))
    assert with_finish(once, 0, at(again_ms)) == once
