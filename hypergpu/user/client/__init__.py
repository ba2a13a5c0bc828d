"""The Python client of a coordinator; programs of users import it as `hypergpu.client`."""

import asyncio
from pathlib import Path

from hypergpu.errors import HyperGPUError, RemoteFailureError
from hypergpu.user.client.asynchronous import AsyncCoordinator
from hypergpu.user.client.blocking import BlockingStream, Coordinator
from hypergpu.user.client.connection import ConnectionTarget, find_target
from hypergpu.user.client.export import ExportedModel
from hypergpu.user.client.history import History, Reached
from hypergpu.user.client.ledger import JobLedger
from hypergpu.user.client.values import (
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
