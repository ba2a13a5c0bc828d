"""Calls about keys by which users sign what they order."""

import asyncio
from dataclasses import dataclass

from coordinator.core.farm.state import ENDED, FarmJob
from coordinator.core.work.work_events import JobPaused
from coordinator.shell.driver.driver import Driver
from coordinator.shell.nodes.identity.spec_keys import SpecKeys
from coordinator.shell.service.calls import Caller
from coordinator.shell.store.journal.records import SpecKeyRecord
from hypergpu.clock import unix_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import TokenId
from hypergpu.units import Milliseconds
from hypergpu.v1 import spec_pb2
from hypergpu.wire.credentials import Role
from hypergpu.wire.specs import succession_value


@dataclass(frozen=True)
class SpecKeyCalls:
    """Registers, lists and revokes keys of the caller's token, an operator those of all."""

    driver: Driver
    keys: SpecKeys

    async def register(self, request: spec_pb2.RegisterSpecKeyRequest, caller: Caller) -> None:
        """Register a key for the caller's token.

        Raises:
            HyperGPUError: As `SpecKeys.register`.
        """
        record = SpecKeyRecord(
            request.public_key, _token_id(caller), request.label, registered_ms=unix_ms()
        )
        predecessor = (
            succession_value(request.predecessor) if request.HasField("predecessor") else None
        )
        await asyncio.to_thread(self.keys.register, record, request.proof, predecessor)

    async def list(self, caller: Caller) -> spec_pb2.ListSpecKeysResponse:
        """Keys that the caller may see."""
        records = await asyncio.to_thread(self.keys.keys, _scope(caller))
        return spec_pb2.ListSpecKeysResponse(
            keys=[
                spec_pb2.SpecKey(
                    public_key=record.public_key,
                    token_id=record.token_id,
                    label=record.label,
                    registered_unix_s=record.registered_ms // 1000,
                    state=record.state,
                )
                for record in records
            ]
        )

    async def revoke(self, public_key: bytes, caller: Caller) -> int:
        """Revoke a key and pause the jobs that it signed; returns the number of these.

        Raises:
            HyperGPUError: As `SpecKeys.revoke`.
        """
        await asyncio.to_thread(self.keys.revoke, _scope(caller), public_key)
        reason = f"the key {public_key.hex()[:16]}... that signed it was revoked"
        event = JobPaused(at_ms=Milliseconds(0), reason=reason)
        jobs = [
            runtime.job.job_id
            for runtime in self.driver.runtimes.values()
            if isinstance(runtime.job, FarmJob)
            and runtime.job.spec is not None
            and runtime.job.spec.public_key == public_key
            and runtime.job.phase not in ENDED
        ]
        return sum([not await self.driver.insist(job_id, event) for job_id in jobs])


def _token_id(caller: Caller) -> TokenId:
    if caller.token is None:
        raise HyperGPUError(Reason.TOKEN_INVALID, "the call carries no token")
    return caller.token.token_id


def _scope(caller: Caller) -> TokenId | None:
    """The token whose keys a caller may list and revoke; None: any."""
    token_id = _token_id(caller)
    is_operator = caller.token is not None and caller.token.role is Role.OPERATOR
    return None if is_operator else token_id
