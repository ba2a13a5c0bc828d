"""Rings in virtual time: whatever is lost and whenever, each session gets its own tokens."""

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ours.stages.virtual_ring import (
    StageKill,
    VirtualRing,
    random_text,
    repeated_text,
)
from coordinator.core.rings.ring_state import RingLimits, StagePace

PACES = st.lists(
    st.builds(
        StagePace,
        st.integers(100, 30_000).map(float),
        st.integers(1, 2_000).map(float),
        st.integers(0, 80_000).map(float),
    ),
    min_size=1,
    max_size=5,
)
SESSIONS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 30), st.integers(0, 900_000)),
    min_size=1,
    max_size=9,
)


@given(PACES, SESSIONS, st.booleans(), st.integers(1, 40), st.data())
@settings(max_examples=80, deadline=None)
def test_every_session_gets_its_tokens_whatever_stages_are_lost(
    paces: list[StagePace],
    sessions: list[tuple[int, int, int]],
    is_repeated: bool,  # noqa: FBT001 - hypothesis gives arguments by place
    tokens_most: int,
    draws: st.DataObject,
) -> None:
    text = repeated_text if is_repeated else random_text
    ring = VirtualRing(paces, RingLimits(tokens_most=tokens_most), text)
    for number, (prompt, answer, at_us) in enumerate(sessions):
        ring.open(number, prompt, answer, at_us)
    kill = st.builds(
        StageKill,
        st.integers(1, 3_000_000).map(float),
        st.integers(0, len(paces) - 1),
        st.integers(1, 400_000).map(float),
    )
    answers = ring.run(draws.draw(st.lists(kill, max_size=5)))
    for number, (prompt, answer, _) in enumerate(sessions):
        expected_tokens = tuple(text(number, prompt + place) for place in range(answer))
        assert answers[number].tokens == expected_tokens
    assert not ring.ring.passes
