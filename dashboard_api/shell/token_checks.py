"""Roles of tokens, as the coordinator tells them: the text of a token proves nothing."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.client import AsyncCoordinator, ConnectionTarget
from hypergpu.user.client.connection import RESTARTING
from hypergpu.wire.credentials import Role, Token, token_text

CURRENT_FOR_MS = 10_000
"""An answer of the coordinator is taken for this long, or until a follower is refused."""
CHECK_WITHIN_S = 10.0
CHECKS_AT_ONCE = 8
ROLES_MAX = 1_024
"""Tokens whose role is remembered; the ones that were asked for longest ago are forgotten."""

TellRole = Callable[[Token], Awaitable[str]]
"""Asks for the role of a token; raises `HyperGPUError` where it is refused."""


class KnownRole(NamedTuple):
    """An answer of the coordinator."""

    role: Role
    asked_at_ms: int


class TokenChecks:
    """Asks the coordinator for each token. Answers are remembered, refusals are not.

    While the coordinator is away, the role that it told last stays.
    """

    def __init__(self, target: ConnectionTarget, tell_role: TellRole | None = None) -> None:
        """Ask the coordinator of ``target``, whose own token needs no asking, or ``tell_role``."""
        self._target = target
        self._coordinator: AsyncCoordinator | None = None
        self._tell_role = tell_role or self._ask_coordinator
        self._roles: OrderedDict[str, KnownRole] = OrderedDict()
        self._asking: dict[str, asyncio.Task[Role]] = {}
        self._places = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def role(self, token: Token) -> Role:
        """Role of a token of this coordinator.

        Raises:
            HyperGPUError: The coordinator refuses the token, or its text names another role;
                COORDINATOR_UNREACHABLE, it is away and never told the role.
        """
        if token == self._target.token:
            return token.role
        text = token_text(token)
        last = self._roles.get(text)
        if last is not None and monotonic_ms() - last.asked_at_ms < CURRENT_FOR_MS:
            return last.role
        task = self._asking.get(text)
        if task is None:
            task = asyncio.create_task(self._ask(token, last))
            self._asking[text] = task
            task.add_done_callback(lambda _: self._asking.pop(text, None))
        # Whoever asked first may go away; the others still wait for the answer.
        return await asyncio.shield(task)

    def forget(self, token: Token) -> None:
        """Ask again at the next request: the coordinator has refused the token meanwhile."""
        self._roles.pop(token_text(token), None)

    async def close(self) -> None:
        """End what is asked and close the connection."""
        tasks = tuple(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._coordinator is not None:
            await self._coordinator.close()

    async def _ask(self, token: Token, last: KnownRole | None) -> Role:
        text = token_text(token)
        try:
            async with self._places:
                name = await self._tell_role(token)
        except HyperGPUError as refusal:
            if refusal.reason in RESTARTING and last is not None:
                return last.role
            self.forget(token)
            raise
        role = _stated_role(token, name)
        self._roles[text] = KnownRole(role, monotonic_ms())
        self._roles.move_to_end(text)
        while len(self._roles) > ROLES_MAX:
            self._roles.popitem(last=False)
        return role

    async def _ask_coordinator(self, token: Token) -> str:
        if self._coordinator is None:
            self._coordinator = await AsyncCoordinator.open(self._target)
        try:
            async with asyncio.timeout(CHECK_WITHIN_S):
                return (await self._coordinator.own_token(token)).role
        except TimeoutError:
            detail = f"the coordinator at {self._target.address} did not answer in time"
            raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail) from None


def _stated_role(token: Token, name: str) -> Role:
    """The role that the coordinator told, if it is the one of the token's text.

    Raises:
        HyperGPUError: TOKEN_INVALID.
    """
    if name != token.role.value:
        detail = f"the token's text says {token.role.value}, and the coordinator says {name[:40]}"
        fix = "paste the token's line as it was printed"
        raise HyperGPUError(Reason.TOKEN_INVALID, detail, fix=fix)
    return token.role
