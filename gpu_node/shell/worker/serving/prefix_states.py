"""Keys and values of conversations that are over, for calls that begin with the same tokens.

They are of one replica's model and in its memory alone, take no more than what open conversations
leave, and go after `PREFIX_MS`. Only a call of the same scope gets them: the coordinator draws it
from the caller and the API key, so that no caller learns what another one asked.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from hypergpu.serving.calls import PREFIX_MS

TOKENS_LEAST = 16
"""Shorter beginnings are read anew: that takes one pass."""
_STATES_MOST = 64


class PrefixState(Protocol):
    """Keys and values of a text's tokens."""

    @property
    def size_bytes(self) -> int:
        """Memory that it takes."""
        ...

    def part(self, tokens: int) -> "PrefixState":
        """Those of the first tokens, as memory of its own."""
        ...


class PrefixKey(NamedTuple):
    """Which calls a state may answer."""

    scope: str
    """See `ModelCall.prefix_scope`; empty: no call."""
    version: int | None
    """Version of a training's model that computed it."""


class HeldPrefix(NamedTuple):
    """A state that a call goes on from."""

    tokens: int
    """Tokens of the call's text that the state is used for; it may have more."""
    state: PrefixState


class _KeptState(NamedTuple):
    key: PrefixKey
    tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    state: PrefixState
    used_s: float


class PrefixStates:
    """States of a replica, the newest last.

    Args:
        clock_s: Monotonic.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._states: list[_KeptState] = []
        self.room_bytes = 0
        """Memory that open conversations leave; kept to by `evict`."""

    @property
    def size_bytes(self) -> int:
        """Memory that all of them take."""
        return sum(each.state.size_bytes for each in self._states)

    def take(self, key: PrefixKey, tokens: Sequence[int]) -> HeldPrefix | None:
        """The state with the longest common beginning; None: none is long enough.

        A state that the text goes on from as a whole, or that has no room any more, is given away;
        of another one the beginning is copied. What is given is no longer counted here.
        """
        text = np.asarray(tokens, np.int64)
        lengths = [_common(each.tokens, text) if each.key == key else 0 for each in self._states]
        best = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if not key.scope or best is None or lengths[best] < TOKENS_LEAST:
            self.evict()
            return None
        entry, length = self._states.pop(best), lengths[best]
        is_whole = length == len(entry.tokens)
        has_room = self.size_bytes + entry.state.size_bytes <= self.room_bytes
        if is_whole or not has_room:
            self.evict()
            return HeldPrefix(length, entry.state)
        self._states.append(entry._replace(used_s=self._clock_s()))
        self.evict()
        return HeldPrefix(length, entry.state.part(length))

    def keep(self, key: PrefixKey, tokens: Sequence[int], state: PrefixState) -> None:
        """Keep the state of a text for later calls, in place of states of its beginnings."""
        if not key.scope or len(tokens) < TOKENS_LEAST:
            return
        text = np.asarray(tokens, np.int64)
        self._states = [
            each
            for each in self._states
            if each.key != key or _common(each.tokens, text) < len(each.tokens)
        ]
        self._states.append(_KeptState(key, text, state, self._clock_s()))
        self.evict()

    def keep_versions(self, versions: Collection[int]) -> None:
        """Let go of what versions of a training's model computed that are not here any more."""
        versions_here = {None, *versions}
        self._states = [each for each in self._states if each.key.version in versions_here]

    def evict(self) -> None:
        """Let go of old states, and of those used least lately until the rest has room."""
        oldest_s = self._clock_s() - PREFIX_MS / 1000
        self._states = [each for each in self._states if each.used_s >= oldest_s][-_STATES_MOST:]
        size_bytes = self.size_bytes
        while self._states and size_bytes > self.room_bytes:
            size_bytes -= self._states.pop(0).state.size_bytes


def _common(
    one: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    other: "np.ndarray[tuple[int], np.dtype[np.int64]]",
) -> int:
    """Length of the common beginning of two texts."""
    length = min(len(one), len(other))
    unlike = np.flatnonzero(one[:length] != other[:length])
    return int(unlike[0]) if len(unlike) else length
