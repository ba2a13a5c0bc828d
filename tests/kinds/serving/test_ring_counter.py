"""Tokens of a ring by its stages."""

import asyncio
from collections.abc import Iterable
from fractions import Fraction

from hypothesis import given
from hypothesis.strategies import integers, lists, tuples

from coordinator.core.serving.budget import units_most
from coordinator.core.serving.counting import WINDOW_UNITS
from coordinator.core.serving.events import WindowCounted
from coordinator.shell.kinds.serving.ring_counter import CountedStage, RingCounter
from coordinator.shell.kinds.serving.token_counter import (
    CountedPart,
    CountWindow,
    TokenCounter,
    UnitTally,
)
from hypergpu.ids import NodeId
from hypergpu.serving.calls import ModelCall
from hypergpu.token_counts import TokenCount

CALL = ModelCall(tokens=(1, 2, 3))
STAGES = [
    CountedStage(NodeId(f"0x{number}"), number + 1, CountedPart(share=Fraction(layers, 9)))
    for number, layers in enumerate((2, 3, 4))
]


def by_layers(cut: Iterable[int]) -> list[CountedStage]:
    """Stages of a ring that counts layer-tokens."""
    return [
        CountedStage(NodeId(f"0x{number}"), number + 1, CountedPart(layers=layers))
        for number, layers in enumerate(cut)
    ]


async def test_stages_share_a_ring_s_tokens_by_their_layers() -> None:
    windows: list[WindowCounted] = []
    tally = UnitTally()
    counter = RingCounter(windows.append, tally)
    counter.review(STAGES)
    counter.begin(1, CALL)
    counter.add_read(1, 90)
    for token in range(45):
        counter.add_token(1, token)
    counter.end(1, has_ended=True)
    counter.close()
    counts = {window.node: window.count for window in windows}
    assert counts[NodeId("0x0")] == TokenCount(20, 10, 1)
    assert counts[NodeId("0x1")] == TokenCount(28, 15, 1)
    assert counts[NodeId("0x2")] == TokenCount(40, 20, 1)
    whole = TokenCount(90, 45, 1)
    assert tally.units == sum(window.count.units for window in windows) <= whole.units
    assert [window.lease for window in sorted(windows, key=lambda each: each.node)] == [1, 2, 3]


async def test_quarters_of_a_stage_s_layer_tokens_are_summed_and_rounded_down_once() -> None:
    windows: list[WindowCounted] = []
    tally = UnitTally()
    counter = RingCounter(windows.append, tally)
    counter.review(by_layers((2, 3, 4)))
    for number in range(3):
        counter.begin(number, CALL)
        counter.add_read(number, 3)
        counter.add_token(number, 7)
        counter.end(number, has_ended=True)
    counter.close()
    counts = {window.node: window.count for window in windows}
    assert counts[NodeId("0x0")] == TokenCount(9, 3, 3, 2)
    # Nine tokens read and three written are 21 quarters in each layer.
    assert sorted(window.count.units for window in windows) == [10, 15, 21]
    assert tally.units == 46 <= 9 * 21 // 4


async def test_a_window_in_layer_tokens_is_as_long_as_one_in_tokens() -> None:
    windows: list[WindowCounted] = []
    counter = RingCounter(windows.append, UnitTally())
    counter.review(by_layers((30,)))
    counter.begin(1, CALL)
    for token in range(WINDOW_UNITS - 1):
        counter.add_token(1, token)
    assert windows == []
    counter.add_token(1, 0)
    assert [window.count.units for window in windows] == [WINDOW_UNITS * 30]
    counter.close()


@given(
    cut=lists(integers(1, 40), min_size=1, max_size=12),
    calls=lists(tuples(integers(0, 30), integers(1, 30)), max_size=8),
)
def test_what_is_counted_and_what_is_set_aside_never_exceed_what_a_budget_covered(
    cut: list[int], calls: list[tuple[int, int]]
) -> None:
    async def check() -> None:
        tally = UnitTally()
        counter = RingCounter(lambda _: None, tally)
        counter.review(by_layers(cut))
        set_aside_units = 0
        for number, (prompt_tokens, new_tokens) in enumerate(calls):
            call = ModelCall(tokens=(1,) * prompt_tokens or (1,), new_tokens_most=new_tokens)
            set_aside_units += units_most(call, 1_000, sum(cut))
            counter.begin(number, call)
            counter.add_read(number, prompt_tokens)
            for token in range(new_tokens):
                counter.add_token(number, token)
            counter.end(number)
            assert tally.units <= set_aside_units
        counter.close()

    asyncio.run(check())


async def test_a_stage_that_is_lost_is_counted_up_to_then_and_its_successor_from_then_on() -> None:
    windows: list[WindowCounted] = []
    counter = RingCounter(windows.append, UnitTally())
    counter.review(STAGES)
    counter.begin(1, CALL)
    for token in range(9):
        counter.add_token(1, token)
    successor = CountedStage(NodeId("0x9"), 9, STAGES[0].part)
    counter.review([successor, *STAGES[1:]])
    (window,) = windows
    assert (window.node, window.count.new_tokens) == (NodeId("0x0"), 2)
    for token in range(9, 27):
        counter.add_token(1, token)
    counter.end(1)
    counter.close()
    counts = {window.node: window.count.new_tokens for window in windows}
    assert counts == {"0x0": 2, "0x9": 4, "0x1": 9, "0x2": 12}


async def test_what_is_passed_on_after_a_replica_is_gone_is_counted_once_its_answer_is_over() -> (
    None
):
    windows: list[WindowCounted] = []
    counter = TokenCounter(
        lambda: CountWindow(NodeId("0x0"), 1, windows.append), lambda _: None, UnitTally()
    )
    counter.begin(1, CALL)
    counter.add_token(1, 7)
    counter.close()
    counter.add_token(1, 8)
    counter.end(1)
    assert [window.count.new_tokens for window in windows] == [1, 1]
