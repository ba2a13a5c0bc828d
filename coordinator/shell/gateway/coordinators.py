"""Which of several coordinators a gateway speaks to: the first that certifies it, until it is gone
or the certificate is to be renewed.
"""

import asyncio
from collections.abc import Sequence

import structlog

from coordinator.shell.gateway.upstream import GatewayIdentity, ReachedCoordinator, made_key
from hypergpu.clock import unix_s
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.credentials import Token

log = structlog.get_logger()

_CHECK_S = 1.5
_FAILED_CHECKS = 2
"""Checks in a row after which a coordinator counts as gone."""
_PAUSE_S = 0.5
_LIFE_PART = 2 / 3
"""Part of a certificate's life after which it is renewed."""
_LASTING = frozenset(
    {
        Reason.AUTHORITY_MISMATCH,
        Reason.REQUEST_INVALID,
        Reason.ROLE_FORBIDDEN,
        Reason.TOKEN_EXPIRED,
        Reason.TOKEN_INVALID,
        Reason.TOKEN_REVOKED,
        Reason.VERSION_MISMATCH,
    }
)
"""Reasons for which another try fails, too."""


class Coordinators:
    """The active coordinator, found among the addresses of all."""

    def __init__(self, addresses: Sequence[str], token: Token, hosts: tuple[str, ...]) -> None:
        self._addresses = addresses
        self._token = token
        self._hosts = hosts
        self._renew_s = 0.0
        """Time of the event loop."""
        self._active: ReachedCoordinator | None = None
        self._retired: list[ReachedCoordinator] = []
        """Earlier ones whose streams go on."""

    @property
    def active(self) -> ReachedCoordinator:
        """The one that calls go to.

        Raises:
            HyperGPUError: NOT_READY, none answers.
        """
        if self._active is None:
            raise HyperGPUError(Reason.NOT_READY, "no coordinator answers this gateway")
        return self._active

    async def find(self) -> ReachedCoordinator:
        """Ask each in turn until one certifies this gateway; from then on it is the active one.

        Raises:
            HyperGPUError: One rejects it for a reason that lasts, and no other takes it.
        """
        identity = GatewayIdentity(self._token, made_key(), self._hosts)
        reported_refusals: frozenset[str] = frozenset()
        while True:
            refusals: list[str] = []
            coordinator = await self._ask_each(identity, refusals)
            if coordinator is not None:
                await self._take(coordinator)
                return coordinator
            if reported_refusals != frozenset(refusals):
                reported_refusals = frozenset(refusals)
                log.warning("no coordinator takes this gateway yet", reasons=refusals)
            await asyncio.sleep(_PAUSE_S)

    async def _ask_each(
        self, identity: GatewayIdentity, refusals: list[str]
    ) -> ReachedCoordinator | None:
        lasting_error: HyperGPUError | None = None
        for address in self._addresses:
            try:
                return await ReachedCoordinator.certify(address, identity)
            except HyperGPUError as error:
                lasting_error = error if error.reason in _LASTING else lasting_error
                refusals.append(f"{address}: {error.detail}")
        if lasting_error is not None:
            raise lasting_error
        return None

    async def _take(self, found: ReachedCoordinator) -> None:
        before, self._active = self._active, found
        loop = asyncio.get_running_loop()
        expires_s = found.certified.certificate_expires_unix_s
        life_s = max(60, expires_s - unix_s()) if expires_s else float("inf")
        self._renew_s = loop.time() + life_s * _LIFE_PART
        log.info("speaking to a coordinator", address=found.address)
        if before is None:
            return
        if before.address == found.address:
            self._retired.append(before)
        else:
            # Whatever it still says counts no more.
            await before.close()

    async def run(self) -> None:
        """Keep an active coordinator until cancelled."""
        while True:
            await self._watch()
            await self.find()

    async def _watch(self) -> None:
        """Return once the active one is gone, or the certificate is due."""
        failed_checks = 0
        loop = asyncio.get_running_loop()
        while failed_checks < _FAILED_CHECKS and loop.time() < self._renew_s:
            await asyncio.sleep(_CHECK_S)
            failed_checks = 0 if await self.active.is_serving() else failed_checks + 1
            for each in [each for each in self._retired if not each.streams]:
                self._retired.remove(each)
                await each.close()
        if failed_checks:
            log.warning("the coordinator does not answer", address=self.active.address)

    async def close(self) -> None:
        """End every stream and call."""
        for each in (*self._retired, *([] if self._active is None else [self._active])):
            await each.close()
