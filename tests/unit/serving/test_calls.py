"""Calls and parts of answers as they travel: sizes and limits first."""

import msgspec
import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.serving.calls import (
    CALL_BYTES_MOST,
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerToken,
    LikelyToken,
    ModelCall,
    Sampling,
    pack_call,
    pack_parts,
    unpack_call,
    unpack_parts,
)
from hypergpu.serving.draws import uniform_draw


def test_a_call_comes_back_as_it_was() -> None:
    call = ModelCall(
        messages=({"role": "user", "content": "hello"},),
        sampling=Sampling(temperature=0.5, seed=7),
        stops=("end",),
        tokens_out=(1, 2),
    )
    assert unpack_call(pack_call(call)) == call


def test_parts_come_back_as_they_were() -> None:
    parts: list[AnswerPart] = [
        AnswerBegun(3),
        AnswerToken(5, "a", -0.5, (LikelyToken(5, "a", -0.5),)),
        AnswerEnded("stop", "b"),
    ]
    assert unpack_parts(pack_parts(parts)) == parts


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (ModelCall(), "one of messages, text and tokens"),
        (ModelCall(text="a", tokens=(1,)), "one of messages, text and tokens"),
        (ModelCall(tokens=()), "tokens of a call"),
        (ModelCall(tokens=(-1,)), "no negative number"),
        (ModelCall(text="a", sampling=Sampling(temperature=float("nan"))), "temperature"),
        (ModelCall(text="a", sampling=Sampling(top_p=0.0)), "top_p"),
        (ModelCall(text="a", sampling=Sampling(seed=-2)), "seed"),
        (ModelCall(text="a", new_tokens_most=0), "new_tokens_most"),
        (ModelCall(text="a", stops=("",)), "stops"),
        (ModelCall(text="a", top_tokens=21), "top_tokens"),
    ],
)
def test_a_call_out_of_its_limits_is_refused_with_the_field(call: ModelCall, reason: str) -> None:
    with pytest.raises(HyperGPUError, match=reason):
        unpack_call(pack_call(call))


def test_a_call_that_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(HyperGPUError, match="1,048,577 bytes"):
        unpack_call(b"\xc1" * (CALL_BYTES_MOST + 1))


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode([1, 2])])
def test_bytes_that_are_no_call_are_refused(body: bytes) -> None:
    with pytest.raises(HyperGPUError, match="malformed"):
        unpack_call(body)


def test_draws_are_even_and_follow_from_seed_and_position() -> None:
    draws = [uniform_draw(seed, place) for seed in range(40) for place in range(50)]
    assert uniform_draw(3, 4) == draws[3 * 50 + 4]
    assert len(set(draws)) == len(draws)
    assert all(0 <= draw < 1 for draw in draws)
    tenths = [sum(low <= draw * 10 < low + 1 for draw in draws) for low in range(10)]
    assert max(tenths) - min(tenths) < 100
