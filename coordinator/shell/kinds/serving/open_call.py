"""A call that is being answered: what came of it so far, wherever it came from."""

import asyncio
import secrets
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.serving.budget import prompt_tokens_most
from coordinator.core.serving.prompt_prefixes import PromptPrefixes
from coordinator.core.serving.routing import QueuedCall
from coordinator.shell.kinds.serving.token_counter import AnswerCounter
from hypergpu.ids import NodeId
from hypergpu.serving.calls import (
    NEW_TOKENS_MOST,
    SEED_MOST,
    UNSTATED_SEED,
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    AnswerVector,
    ModelCall,
)
from hypergpu.token_counts import TokenCount

PARTS_MOST = 8_192
"""Parts that wait for a caller who does not read; then the call is given up."""


class RouteTold(NamedTuple):
    """Where a call is answered from here on."""

    node: NodeId
    reason: str
    fingerprint: str


class RouteLost(NamedTuple):
    """The replica that answered is gone, or has no place for the call."""

    reason: str


def with_seed(call: ModelCall) -> ModelCall:
    """The call with a seed: the one that it states, or else one that is drawn."""
    if call.sampling.seed != UNSTATED_SEED:
        return call
    seed = secrets.randbelow(SEED_MOST + 1)
    return replace(call, sampling=replace(call.sampling, seed=seed))


@dataclass
class PromptReading:
    """How far the replica at work has read a call's prompt."""

    prefixes: PromptPrefixes
    """Beginnings of the prompt, by digests."""
    given_ms: int = 0
    """When the replica was given the call."""
    expected_tokens: int = 0
    """Tokens of the prompt that it was expected to hold."""
    unheld_tokens: int = 0
    """Tokens of the prompt that it has to read, as it says."""
    is_over: bool = False
    """Whether its first token is there."""


class OpenCall:
    """A call, from its arrival until its last part."""

    def __init__(self, number: int, call: ModelCall, prefixes: PromptPrefixes) -> None:
        self.number = number
        """By which the replica at work answers. A new one for each replica."""
        self._call = call
        self._tokens_out: list[int] = []
        self.reading = PromptReading(prefixes)
        self.node: NodeId | None = None
        """Replica that answers; None: none does."""
        self.refusals: dict[NodeId, str] = {}
        """Replicas that did not answer it, with the reason."""
        self.queue_reason = ""
        """Why it waits, or waited, where it does; empty: it came behind all others."""
        self.heard_ms = 0
        """When its newest part came, or it was given to its replica."""
        self.has_begun = False
        self.version: int | None = None
        """Version of a training's model that answers it: an answer ends on the one it began with.
        """
        self.prompt_tokens_most = prompt_tokens_most(call)
        """Tokens that its prompt can have at most, whatever a replica says."""
        self.counter: AnswerCounter | None = None
        """Counts what the replica gives; None: answers have no receipts."""
        self._has_read = False
        self.reserved_units = 0
        """Units of its answer that are set aside and not counted yet."""
        self.units_per_token = 1
        """Those of a token in the whole model."""
        self.inbox: asyncio.Queue[AnswerPart | RouteLost] = asyncio.Queue(PARTS_MOST)

    @property
    def tokens_out(self) -> int:
        """Tokens of the answer that are out."""
        return len(self._tokens_out)

    @property
    def queue_entry(self) -> QueuedCall:
        """The call as it waits for a replica."""
        return QueuedCall(self._call.priority, bool(self._tokens_out))

    def note_output(self, part: AnswerToken | AnswerVector) -> None:
        """Note what is out. A token is never changed and never told again; a vector counts by the
        text that was read.
        """
        if isinstance(part, AnswerVector):
            return
        self._tokens_out.append(part.token)
        if self.counter is not None:
            self.counter.add_token(self.number, part.token)
            self._use(1)

    def note_read(self, prompt_tokens: int) -> None:
        """Note that the replica has read the prompt, and what was out before; it counts once."""
        if self.counter is not None and not self._has_read:
            self._has_read = True
            self.counter.add_read(self.number, prompt_tokens)
            self._use(TokenCount(prompt_tokens=prompt_tokens + self.tokens_out).units)

    def _use(self, tokens: int) -> None:
        used_units = tokens * self.units_per_token
        self.reserved_units = max(0, self.reserved_units - used_units)

    def end_count(self, end: AnswerPart | None) -> None:
        """Nothing more of what the replica gives is passed on.

        Args:
            end: The last part; None: the answer was broken off.
        """
        if self.counter is not None:
            # Where a text ended the answer, the model need not have.
            is_stop = isinstance(end, AnswerEnded) and end.finish == "stop"
            self.counter.end(self.number, has_ended=is_stop and not self._call.stops)
        self.counter, self.reserved_units = None, 0

    @property
    def is_overfull(self) -> bool:
        """Whether more tokens came than were asked for, or than any answer may have."""
        return len(self._tokens_out) >= (self._call.new_tokens_most or NEW_TOKENS_MOST)

    def route_fault(self, part: AnswerPart | RouteLost) -> str:
        """Why another replica is to go on after a part; empty: it is a part of the answer."""
        if isinstance(part, AnswerRefused) and not part.is_lasting:
            return part.reason
        if isinstance(part, AnswerBegun) and not 0 <= part.prompt_tokens <= self.prompt_tokens_most:
            return "its replica counts more tokens than the prompt can have"
        if isinstance(part, AnswerBegun) and not 0 <= part.held_tokens <= part.prompt_tokens:
            return "its replica held more tokens than the prompt has"
        if isinstance(part, AnswerToken) and self.is_overfull:
            return "its replica gave more tokens than were asked for"
        return ""

    def continuation(self) -> ModelCall:
        """The call as another replica is to go on with it."""
        return replace(self._call, tokens_out=tuple(self._tokens_out), version=self.version)

    def begin_route(self, node: NodeId, number: int, at_ms: int) -> None:
        """Another replica answers: what the one before said and nobody has seen counts for nothing.

        Such a token comes again, from this one.
        """
        self._drop_unseen()
        self.node, self.number, self.heard_ms = node, number, at_ms
        self.reading = PromptReading(self.reading.prefixes, given_ms=at_ms)
        self._has_read = False

    def end_route(self, reason: str) -> None:
        """The replica does not answer any more."""
        self._drop_unseen()
        self.node = None
        self.inbox.put_nowait(RouteLost(reason))

    def _drop_unseen(self) -> None:
        while not self.inbox.empty():
            self.inbox.get_nowait()
