"""Tokens of a ring by its stages."""

from fractions import Fraction

from coordinator.core.serving.events import WindowCounted
from coordinator.shell.kinds.serving.ring_counter import CountedStage, RingCounter
from coordinator.shell.kinds.serving.token_counter import CountWindow, TokenCounter, UnitTally
from hypergpu.ids import NodeId
from hypergpu.serving.calls import ModelCall
from hypergpu.token_counts import TokenCount

CALL = ModelCall(tokens=(1, 2, 3))
STAGES = [
    CountedStage(NodeId(f"0x{number}"), number + 1, Fraction(layers, 9))
    for number, layers in enumerate((2, 3, 4))
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


async def test_a_stage_that_is_lost_is_counted_up_to_then_and_its_successor_from_then_on() -> None:
    windows: list[WindowCounted] = []
    counter = RingCounter(windows.append, UnitTally())
    counter.review(STAGES)
    counter.begin(1, CALL)
    for token in range(9):
        counter.add_token(1, token)
    successor = CountedStage(NodeId("0x9"), 9, STAGES[0].share)
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
