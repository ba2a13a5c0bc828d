"""How much of a prompt a replica has read before, by digests that tell nothing of it."""

from msgspec.structs import replace

from coordinator.core.serving.prompt_prefixes import (
    HELD_MARKS_MOST,
    MARK_BYTES,
    MARKS_MOST,
    HeldPrefixes,
    PromptMark,
    prompt_prefixes,
)
from hypergpu.serving.calls import PREFIX_MS, ModelCall
from hypergpu.units import Milliseconds

KEY = bytes(32)
NOW = Milliseconds(5_000)
ASK = {"role": "user", "content": "hello " * 200}
ANSWER = {"role": "assistant", "content": "well " * 50}
FIRST = ModelCall(messages=(ASK,), prefix_scope="s")
SECOND = ModelCall(messages=(ASK, ANSWER, {"role": "user", "content": "more"}), prefix_scope="s")


def held_by(call: ModelCall) -> HeldPrefixes:
    prefixes_there = HeldPrefixes()
    prefixes_there.note_read(prompt_prefixes(call, KEY).marks, NOW)
    return prefixes_there


def test_the_next_turn_of_a_conversation_is_held_as_far_as_the_one_before() -> None:
    second = prompt_prefixes(SECOND, KEY)
    assert held_by(FIRST).tokens_of(second.marks, NOW) == prompt_prefixes(FIRST, KEY).tokens
    assert second.tokens > prompt_prefixes(FIRST, KEY).tokens > 290
    other_turn = replace(SECOND, messages=({**ASK, "content": "x"}, *(SECOND.messages or ())[1:]))
    assert held_by(FIRST).tokens_of(prompt_prefixes(other_turn, KEY).marks, NOW) == 0
    tools = replace(SECOND, tools=({"type": "function"},))
    assert held_by(FIRST).tokens_of(prompt_prefixes(tools, KEY).marks, NOW) == 0


def test_texts_and_tokens_are_held_by_the_piece() -> None:
    text = ModelCall(text="a" * 3 * MARK_BYTES + "b", prefix_scope="s")
    branch = replace(text, text="a" * 2 * MARK_BYTES + "c" * MARK_BYTES)
    prefixes_there = held_by(text)
    assert prefixes_there.tokens_of(prompt_prefixes(branch, KEY).marks, NOW) == 2 * MARK_BYTES // 4
    tokens = ModelCall(tokens=(*range(200), 2**31), prefix_scope="s")
    longer = replace(tokens, tokens=(*range(200), 7, 8))
    assert held_by(tokens).tokens_of(prompt_prefixes(longer, KEY).marks, NOW) == 128


def test_other_scopes_and_other_processes_have_other_digests() -> None:
    second = prompt_prefixes(replace(SECOND, prefix_scope="t"), KEY)
    assert held_by(FIRST).tokens_of(second.marks, NOW) == 0
    assert held_by(FIRST).tokens_of(prompt_prefixes(SECOND, bytes([1] * 32)).marks, NOW) == 0
    assert prompt_prefixes(replace(SECOND, prefix_scope=""), KEY).marks == ()


def test_what_a_replica_held_less_than_expected_is_forgotten_and_so_is_what_is_old() -> None:
    prefixes_there, marks = held_by(FIRST), prompt_prefixes(FIRST, KEY).marks
    tokens = marks[-1].tokens
    assert prefixes_there.tokens_of(marks, Milliseconds(NOW + PREFIX_MS)) == 0
    prefixes_there.note_missing(marks, 0.5)
    assert 0 < prefixes_there.tokens_of(marks, NOW) <= tokens // 2
    prefixes_there.note_missing(marks, 0.0)
    assert prefixes_there.tokens_of(marks, NOW) == 0


def test_digests_of_a_prompt_and_of_a_replica_are_bounded() -> None:
    long_text = ModelCall(text="x" * (1 << 20), prefix_scope="s")
    prefixes = prompt_prefixes(long_text, KEY)
    assert len(prefixes.marks) == MARKS_MOST
    assert prefixes.tokens == (1 << 20) // 4
    prefixes_there = HeldPrefixes()
    marks = [PromptMark(number.to_bytes(16, "big"), number) for number in range(20_000)]
    prefixes_there.note_read(marks, NOW)
    assert len(prefixes_there) == HELD_MARKS_MOST
    assert prefixes_there.tokens_of(marks[:100], NOW) == 0
    assert prefixes_there.tokens_of(marks, NOW) == 19_999
