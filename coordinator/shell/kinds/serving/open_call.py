"""A call that is being answered: what came of it so far, wherever it came from."""

import asyncio
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.ids import NodeId
from hypergpu.serving.calls import AnswerPart, AnswerToken, ModelCall

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

    def continuation(self) -> ModelCall:
        """The call as another replica is to go on with it."""
        return replace(self._call, tokens_out=tuple(self._tokens_out))

    def end_route(self, reason: str) -> None:
        """The replica does not answer any more. Its parts that are not out yet count for nothing.

        A token that nobody has seen comes again, from the next replica.
        """
        while not self.inbox.empty():
            self.inbox.get_nowait()
        self.node = None
        self.inbox.put_nowait(RouteLost(reason))
