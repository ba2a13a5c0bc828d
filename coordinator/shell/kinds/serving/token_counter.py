"""Counts the tokens of one replica that were passed on, from one window to the next.

All of it is in memory: what was not reported when this process dies is lost, and paid to nobody.
"""

import asyncio
import secrets
from collections.abc import Callable

from coordinator.core.serving.counting import WINDOW_MS, WINDOW_UNITS
from coordinator.core.serving.events import WindowCounted
from hypergpu.ids import NodeId
from hypergpu.serving.calls import ModelCall, pack_call
from hypergpu.token_counts import TokenCount, chain_digest, first_link, next_link
from hypergpu.units import Milliseconds

ReportCount = Callable[[WindowCounted], None]
_SALT_BYTES = 16
_NOW = Milliseconds(0)  # stamped by the driver


class _Segment:
    """What a replica wrote of one answer in a window."""

    def __init__(self, call: ModelCall) -> None:
        self.call = call
        self.tokens: list[int] = []
        self.is_counted = False


class TokenCounter:
    """Tokens of a replica under one lease.

    Args:
        node: Has the replica.
        lease: Number of its lease.
        report: Called with the count of each window that is over.
    """

    def __init__(self, node: NodeId, lease: int, report: ReportCount) -> None:
        self._node = node
        self._lease = lease
        self._report = report
        self._segments: dict[int, _Segment] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._begin_window()

    def _begin_window(self) -> None:
        self._count = TokenCount()
        self._salt = secrets.token_bytes(_SALT_BYTES)
        self._link = first_link(self._salt)

    @property
    def units(self) -> int:
        """Units of the window so far."""
        return self._count.units

    def begin(self, number: int, call: ModelCall) -> None:
        """A call goes to the replica, with the tokens that are out."""
        self._segments[number] = _Segment(call)

    def add_read(self, number: int, prompt_tokens: int) -> None:
        """The replica has read the prompt of a call, and what another replica wrote of it."""
        read_tokens = prompt_tokens + len(self._segments[number].call.tokens_out)
        self._add(number, TokenCount(prompt_tokens=read_tokens))

    def add_token(self, number: int, token: int) -> None:
        """A token of the replica was passed on."""
        self._segments[number].tokens.append(token)
        self._add(number, TokenCount(new_tokens=1))

    def _add(self, number: int, count: TokenCount) -> None:
        segment = self._segments[number]
        answers = 0 if segment.is_counted else 1
        segment.is_counted = True
        self._count = self._count.plus(count).plus(TokenCount(answers=answers))
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(WINDOW_MS / 1000, self.close_window)
        if self._count.units >= WINDOW_UNITS:
            self.close_window()

    def end(self, number: int) -> None:
        """The replica does not answer a call any more."""
        segment = self._segments.pop(number, None)
        if segment is not None:
            self._link_segment(segment)

    def _link_segment(self, segment: _Segment) -> None:
        if segment.is_counted:
            self._link = next_link(self._link, pack_call(segment.call), segment.tokens)

    def close_window(self) -> None:
        """End the window, and report it if anything was counted; open answers go on in the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for segment in self._segments.values():
            self._link_segment(segment)
            segment.tokens, segment.is_counted = [], False
        count, salt, link = self._count, self._salt, self._link
        self._begin_window()
        if count.units:
            self._report(
                WindowCounted(
                    at_ms=_NOW,
                    node=self._node,
                    lease=self._lease,
                    count=count,
                    answers=chain_digest(link),
                    salt=salt.hex(),
                )
            )
