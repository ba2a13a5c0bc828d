"""What a replica has read for calls before: who gets it, for how long, in how much memory."""

from gpu_node.shell.worker.serving.prefix_states import HeldPrefix, PrefixKey, PrefixStates
from hypergpu.serving.calls import PREFIX_MS

ALICE, BOB = PrefixKey("alice", None), PrefixKey("bob", None)
TEXT = list(range(100, 150))


class CountedState:
    """As many bytes as tokens."""

    def __init__(self, tokens: int) -> None:
        self.size_bytes = tokens

    def part(self, tokens: int) -> "CountedState":
        """See `PrefixState.part`."""
        return CountedState(tokens)


class SetClock:
    """Seconds as a test wants them."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def states_with(*texts: list[int], room_bytes: int = 1_000) -> PrefixStates:
    states = PrefixStates(SetClock())
    states.room_bytes = room_bytes
    for text in texts:
        states.keep(ALICE, text, CountedState(len(text)))
    return states


def held_tokens(prefix: HeldPrefix | None) -> int:
    return 0 if prefix is None else prefix.tokens


def test_a_text_goes_on_from_the_longest_beginning_of_its_own_scope_and_version() -> None:
    states = states_with([*TEXT[:20], 1], [*TEXT[:30], 2])
    assert held_tokens(states.take(BOB, TEXT)) == 0
    assert held_tokens(states.take(PrefixKey("", None), TEXT)) == 0
    assert held_tokens(states.take(ALICE._replace(version=3), TEXT)) == 0
    assert held_tokens(states.take(ALICE, TEXT)) == 30
    assert held_tokens(states.take(ALICE, TEXT[:10])) == 0


def test_a_state_that_another_text_branches_from_stays_while_there_is_room_for_a_copy() -> None:
    states = states_with(TEXT)
    assert held_tokens(states.take(ALICE, [*TEXT[:30], 7, 8])) == 30
    assert held_tokens(states.take(ALICE, [*TEXT, 9])) == 50
    assert states.size_bytes == 0
    narrow = states_with(TEXT)
    narrow.room_bytes = 40
    prefix = narrow.take(ALICE, [*TEXT[:30], 7, 8])
    assert prefix is not None
    assert (prefix.tokens, narrow.size_bytes) == (30, 0)


def test_the_state_of_a_longer_text_takes_the_place_of_its_beginnings() -> None:
    states = states_with(TEXT[:30], TEXT)
    assert states.size_bytes == 50


def test_memory_that_conversations_need_is_given_back_by_those_used_least_lately() -> None:
    states = states_with([1, *TEXT], [2, *TEXT])
    states.room_bytes = 60
    states.evict()
    assert held_tokens(states.take(ALICE, [1, *TEXT])) == 0
    assert held_tokens(states.take(ALICE, [2, *TEXT])) == 51


def test_old_states_and_those_of_versions_that_are_gone_are_let_go() -> None:
    clock = SetClock()
    states = PrefixStates(clock)
    states.room_bytes = 1_000
    states.keep(ALICE._replace(version=1), TEXT, CountedState(50))
    states.keep_versions((2,))
    assert states.size_bytes == 0
    states.keep(ALICE, TEXT, CountedState(50))
    clock.now_s = PREFIX_MS / 1000 + 1
    states.evict()
    assert states.size_bytes == 0
