"""Python API of a coordinator: everything that `hypergpu job`, `node` and `token` do.

Without arguments ``connect`` takes the coordinator that the environment, the settings file or
`hypergpu up` on this machine name:

>>> from hypergpu.client import connect
>>> with connect() as coordinator:
...     job = coordinator.submit("job.toml")
...     for update in coordinator.watch(job):
...         if isinstance(update, JobEvent) and update.kind == "RoundRecorded":
...             print("round", update.body["round"] + 1)
...     detail = coordinator.job(job)
...     exported = coordinator.export(job, Path("model"))
round 1
round 2
>>> detail.job.phase
'finished'
>>> exported.model.name
'model.safetensors'

The same calls without blocking:

>>> async def list_jobs():
...     async with await connect_async() as coordinator:
...         return [job.phase for job in await coordinator.jobs()]
>>> asyncio.run(list_jobs())
['finished']

Errors have a number, a message and a fix:

>>> with connect() as coordinator:
...     try:
...         coordinator.find_job("nothing")
...     except HyperGPUError as error:
...         print(error.reason.number, error.detail, "-", error.fix)
2001 there is no job 'nothing' - list the jobs: hypergpu job ls
"""

import asyncio
from pathlib import Path

from hypergpu.client.asynchronous import AsyncCoordinator
from hypergpu.client.blocking import BlockingStream, Coordinator
from hypergpu.client.connection import ConnectionTarget, find_target
from hypergpu.client.export import ExportedModel
from hypergpu.client.history import History, Reached
from hypergpu.client.ledger import JobLedger
from hypergpu.client.values import (
    ENDED,
    JobDetail,
    JobEvent,
    JobUpdate,
    JobView,
    NodeLevelsView,
    NodeView,
    ParticipantView,
    RoundProgress,
    TokenMade,
    TokenView,
)
from hypergpu.errors import HyperGPUError, RemoteFailureError
from hypergpu.wire.credentials import Role

__all__ = [
    "ENDED",
    "AsyncCoordinator",
    "BlockingStream",
    "ConnectionTarget",
    "Coordinator",
    "ExportedModel",
    "History",
    "HyperGPUError",
    "JobDetail",
    "JobEvent",
    "JobLedger",
    "JobUpdate",
    "JobView",
    "NodeLevelsView",
    "NodeView",
    "ParticipantView",
    "Reached",
    "RemoteFailureError",
    "Role",
    "RoundProgress",
    "TokenMade",
    "TokenView",
    "connect",
    "connect_async",
]


def connect(
    address: str | None = None,
    *,
    token: str | None = None,
    token_file: Path | str | None = None,
    profile: Path | None = None,
) -> Coordinator:
    """Open a connection.

    Args:
        address: ``host:port``; else one of the token's addresses.
        token: A user's or operator's token.
        token_file: The file that holds it.
        profile: A settings file to read instead of the user's.

    Raises:
        HyperGPUError: No coordinator is named, none answers, or it is another than the token's.
    """
    return Coordinator(find_target(_flags(address, token, token_file), profile))


async def connect_async(
    address: str | None = None,
    *,
    token: str | None = None,
    token_file: Path | str | None = None,
    profile: Path | None = None,
) -> AsyncCoordinator:
    """Open a connection without blocking; takes and raises what ``connect`` does."""
    flags = _flags(address, token, token_file)
    return await AsyncCoordinator.open(await asyncio.to_thread(find_target, flags, profile))


def _flags(
    address: str | None, token: str | None, token_file: Path | str | None
) -> dict[str, str | None]:
    file = str(token_file) if token_file else None
    return {"address": address, "token": token, "token_file": file}
