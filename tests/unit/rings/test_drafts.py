from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.rings.drafts import DraftCosts, DraftRecord, draft_length, prompt_lookup

COSTS = DraftCosts(60_000, 3_600, 120_000, 20_000, 1_200)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 8))
def test_a_draft_is_what_followed_the_same_tokens_before(tokens: list[int], most: int) -> None:
    draft = prompt_lookup(tokens, most)
    sizes = [
        size
        for size in (3, 2, 1)
        if any(tokens[at : at + size] == tokens[-size:] for at in range(len(tokens) - size))
    ]
    if not sizes:
        assert draft == ()
        return
    size = sizes[0]
    places = [at for at in range(len(tokens) - size) if tokens[at : at + size] == tokens[-size:]]
    assert draft == tuple(tokens[places[-1] + size : places[-1] + size + most])


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=20))
def test_tokens_are_compared_whole_and_not_by_their_bytes(tokens: list[int]) -> None:
    tokens_between = [0x01020304, 0x05010203, *tokens, 0x04000000]
    assert all(token in tokens_between for token in prompt_lookup(tokens_between, 4))


def test_the_length_follows_from_how_often_guesses_are_right() -> None:
    lengths = [draft_length(COSTS, accuracy, 1, 1) for accuracy in (0.01, 0.5, 0.87, 0.97)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] >= 10


def test_drafts_end_where_sessions_fill_the_ring() -> None:
    assert draft_length(COSTS, 0.5, 64, 4) < draft_length(COSTS, 0.5, 1, 1)


def test_guesses_count_up_to_the_first_wrong_one() -> None:
    record = DraftRecord().with_guesses((1, 2, 3, 4), (1, 2, 9))
    assert record.hits == (True, True, False)
    assert record.with_guesses((), (5,)) == record
    assert len(record.with_guesses((7,) * 50, (7,) * 50).hits) == 32
