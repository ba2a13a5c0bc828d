"""A call that is being answered: what came of it so far, wherever it came from."""

import asyncio
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.ids import NodeId
from hypergpu.serving.calls import NEW_TOKENS_MOST, AnswerPart, AnswerToken, ModelCall

PARTS_MOST = 8_192
"""Parts that wait for a caller who does not read; then the call is given up."""


class RouteLost(NamedTuple):
    """The replica that answered is gone, or has no place for the call."""

    reason: str


class OpenCall:
    """A call, from its arrival until its last part."""

    def __init__(self, number: int, call: ModelCall) -> None:
        self.number = number
        """By which the replica at work answers. A new one for each replica."""
        self._call = call
        self._tokens_out: list[int] = []
        self.node: NodeId | None = None
        """Replica that answers; None: none does."""
        self.refusals: dict[NodeId, str] = {}
        """Replicas that did not answer it, with the reason."""
        self.heard_ms = 0
        """When its newest part came, or it was given to its replica."""
        self.has_begun = False
        self.inbox: asyncio.Queue[AnswerPart | RouteLost] = asyncio.Queue(PARTS_MOST)

    @property
    def tokens_out(self) -> int:
        """Tokens of the answer that are out."""
        return len(self._tokens_out)

    def note_token(self, part: AnswerToken) -> None:
        """Note a token that is out: it is never changed and never told again."""
        self._tokens_out.append(part.token)

    @property
    def is_overfull(self) -> bool:
        """Whether more tokens came than were asked for, or than any answer may have."""
        return len(self._tokens_out) >= (self._call.new_tokens_most or NEW_TOKENS_MOST)

    def continuation(self) -> ModelCall:
        """The call as another replica is to go on with it."""
        return replace(self._call, tokens_out=tuple(self._tokens_out))

    def begin_route(self, node: NodeId, number: int, at_ms: int) -> None:
        """Another replica answers: what the one before said and nobody has seen counts for nothing.

        Such a token comes again, from this one.
        """
        self._drop_unseen()
        self.node, self.number, self.heard_ms = node, number, at_ms

    def end_route(self, reason: str) -> None:
        """The replica does not answer any more."""
        self._drop_unseen()
        self.node = None
        self.inbox.put_nowait(RouteLost(reason))

    def _drop_unseen(self) -> None:
        while not self.inbox.empty():
            self.inbox.get_nowait()
