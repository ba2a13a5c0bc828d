import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypergpu.errors import HyperGPUError
from hypergpu.serving.calls import ModelCall
from hypergpu.serving.stage_messages import (
    MESSAGE_BYTES_MOST,
    BeginAnswer,
    ComputePass,
    StageRows,
    StageSegment,
    pack_stage_message,
    unpack_stage_reply,
    unpack_stage_request,
)

SEGMENT = StageSegment(1, 0, 2)


def test_a_pass_comes_as_it_was_sent() -> None:
    segments = (StageSegment(1, 7, 3, 3, (4, 5)), StageSegment(2, 0, 1))
    request = ComputePass(segments=segments, states=b"four rows")
    assert unpack_stage_request(pack_stage_message(request)) == request
    assert request.rows == 4


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"segments": ()}, "segments"),
        ({"segments": (SEGMENT,) * 300}, "segments"),
        ({"states": b"x"}, "either tokens or states"),
        ({"tokens": ()}, "either tokens or states"),
        ({"tokens": (5,)}, "a token for each row"),
        ({"segments": (StageSegment(1, -1, 2),)}, "places from 0 on"),
        ({"segments": (StageSegment(1, 0, 2, 3),)}, "rows that it has"),
        ({"segments": (StageSegment(1, 0, 2, 1, (4,)),)}, "rows that it has"),
    ],
)
def test_a_pass_that_states_what_it_has_not_is_refused(changes: dict[str, Any], rule: str) -> None:
    fields: dict[str, Any] = {"segments": (SEGMENT,), "tokens": (5, 6), **changes}
    with pytest.raises(HyperGPUError, match=rule):
        unpack_stage_request(pack_stage_message(ComputePass(**fields)))


def test_a_message_that_is_too_large_is_neither_sent_nor_read() -> None:
    states = bytes(MESSAGE_BYTES_MOST)
    with pytest.raises(HyperGPUError, match="at most"):
        pack_stage_message(StageRows(states))
    with pytest.raises(HyperGPUError, match="at most"):
        unpack_stage_reply(states + b"x")


def test_a_call_that_breaks_its_limits_is_refused() -> None:
    body = pack_stage_message(BeginAnswer(1, ModelCall()))
    with pytest.raises(HyperGPUError, match="one of messages, text and tokens"):
        unpack_stage_request(body)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    for read in (unpack_stage_request, unpack_stage_reply):
        with contextlib.suppress(HyperGPUError):
            read(content)
