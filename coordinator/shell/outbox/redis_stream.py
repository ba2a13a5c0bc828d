"""A Redis stream that takes messages, and says whether it still has what it took."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit, urlunsplit

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from coordinator.shell.outbox.messages import OutboxMessage, StreamAwayError
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId

_SCHEMES = ("redis", "rediss", "unix")
_STREAM = "hypergpu"
_LENGTH_MAX = 1_000_000
_TIMEOUT_S = 10
_PAGE = 1_000


# One script, so that a server that lost its data and came back takes nothing before we know of it.
_APPEND = """
local newest, length, width = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if newest ~= '' and #redis.call('XRANGE', KEYS[1], newest, newest) == 0 then return false end
local ids = {}
for first = 4, #ARGV, 2 * width do
  local last = first + 2 * width - 1
  ids[#ids + 1] = redis.call('XADD', KEYS[1], '*', unpack(ARGV, first, last))
end
if length > 0 and #ids > 0 then redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', length) end
return ids
"""


class StreamAddress(NamedTuple):
    """Where events go."""

    url: str
    """Address of the server, with its credentials."""
    stream: str
    """Key of the stream."""
    length_max: int
    """About how many entries the stream keeps; 0: all."""

    @property
    def public_url(self) -> str:
        """Without credentials."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def parse_address(text: str) -> StreamAddress:
    """Read ``redis://HOST:PORT/DB?stream=NAME&maxlen=N``.

    Raises:
        HyperGPUError: ARGUMENT_INVALID.
    """
    parts = urlsplit(text)
    query_values = parse_qs(parts.query, keep_blank_values=True)
    (stream, *_), (length, *_) = (
        query_values.pop("stream", [_STREAM]),
        query_values.pop("maxlen", [_LENGTH_MAX]),
    )
    problem = ""
    if parts.scheme not in _SCHEMES:
        problem = f"{parts.scheme or 'no scheme'} is not one of {', '.join(_SCHEMES)}"
    elif query_values:
        problem = f"{', '.join(sorted(query_values))} is not known"
    elif not stream:
        problem = "stream is empty"
    elif not str(length).isdecimal():
        problem = "maxlen is no number"
    if problem:
        fix = "write redis://HOST:6379/0?stream=NAME&maxlen=N; all behind the host may be left out"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"the address of events: {problem}", fix=fix)
    return StreamAddress(urlunsplit(parts._replace(query="")), stream, int(length))


class RedisStream:
    """One stream, by one connection at a time."""

    def __init__(self, address: StreamAddress) -> None:
        self._address = address
        # Nothing is tried again down here: after each failure we look whether data was lost.
        self._redis: Redis = Redis.from_url(
            address.url,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
        )

    async def append(self, messages: Sequence[OutboxMessage], newest_id: str) -> list[str] | None:
        """Append messages in order: all, or none.

        Args:
            messages: Any number.
            newest_id: An entry that has to be there still; empty: none has.

        Returns:
            Ids of the new entries; None where that entry is not there: nothing was appended.

        Raises:
            StreamAwayError: They may or may not have arrived.
        """
        words = [word for message in messages for pair in message.fields().items() for word in pair]
        width = len(words) // 2 // len(messages) if messages else 1
        arguments: list[str | bytes | int] = [newest_id, self._address.length_max, width, *words]
        async with self._explain_errors():
            reply = self._redis.eval(_APPEND, 1, self._address.stream, *arguments)
            ids = msgspec.convert(await reply, list[bytes] | None)
        return None if ids is None else [each.decode() for each in ids]

    async def newest_sequences(self, jobs: Collection[JobId]) -> dict[JobId, tuple[int, str]]:
        """Newest row of each job that the stream has an entry of, and that entry's id.

        Raises:
            StreamAwayError: It does not answer.
        """
        newest_by_job: dict[JobId, tuple[int, str]] = {}
        end = "+"
        while len(newest_by_job) < len(jobs):
            async with self._explain_errors():
                reply = await self._redis.xrevrange(self._address.stream, end, "-", count=_PAGE)
            page = msgspec.convert(reply, list[tuple[bytes, dict[bytes, bytes]]])
            for entry_id, fields in page:
                job_id = JobId(fields.get(b"job", b"").decode())
                if job_id in jobs and job_id not in newest_by_job:
                    newest_by_job[job_id] = int(fields[b"sequence"]), entry_id.decode()
            if len(page) < _PAGE:
                break
            end = f"({page[-1][0].decode()}"
        return newest_by_job

    @asynccontextmanager
    async def _explain_errors(self) -> AsyncIterator[None]:
        try:
            yield
        except (RedisError, OSError) as away:
            await self.close()
            raise StreamAwayError(f"{self._address.public_url}: {away}") from away
        finally:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The library waits by `asyncio.wait_for`, which may have lost the cancellation.
                raise asyncio.CancelledError

    async def check(self) -> None:
        """See whether the server answers, takes scripts, and has a stream or nothing there.

        Raises:
            StreamAwayError: It does not.
        """
        await self.append([], "0-1")
        await self.close()

    async def close(self) -> None:
        """End the connections; another call connects afresh."""
        await self._redis.aclose()
