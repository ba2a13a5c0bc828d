"""PaymentsService for the holders of tokens: a ledger is read by those who may see its job."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from coordinator.shell.service.calls import Caller

RequireVisible = Callable[[Caller, str], None]
"""Raises `HyperGPUError` where a caller may not see the job of an id."""


class VisibleLedgers:
    """The reading methods of a payments servicer, behind the rule of who sees a job."""

    def __init__(self, servicer: Any, require_visible: RequireVisible) -> None:
        self._servicer = servicer
        self._require_visible = require_visible

    async def get_ledger(self, request: Any, caller: Caller) -> Any:
        """See `PaymentsService.GetLedger`."""
        self._require_visible(caller, request.job_id)
        return await self._servicer.get_ledger(request, caller)

    async def list_receipts(self, request: Any, caller: Caller) -> AsyncIterator[Any]:
        """See `PaymentsService.ListReceipts`."""
        self._require_visible(caller, request.job_id)
        async for answer in self._servicer.list_receipts(request, caller):
            yield answer
