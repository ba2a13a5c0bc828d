"""`Coordinator`: the asynchronous one on a thread of its own, for programs without an event loop.

No method has a second body here: each waits for the coroutine of `AsyncCoordinator`.
"""

import asyncio
import atexit
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from hypergpu.user.client.asynchronous import AsyncCoordinator
from hypergpu.user.client.connection import ConnectionTarget

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of all connections of this process; gRPC is used from one loop only."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="hypergpu-client", daemon=True)
    thread.start()

    def end() -> None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    atexit.register(end)
    return loop


def wait_for(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Wait for a coroutine on the client's loop; it is cancelled when the wait is interrupted."""
    return _wait(asyncio.run_coroutine_threadsafe(work, _loop()))


def _wait(future: "Future[_Result]") -> _Result:
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def _next(items: AsyncIterator[_Item]) -> _Item:
    return await anext(items)


_NEWEST_WAIT_S = 1.0


class BlockingStream(Generic[_Item], Iterator[_Item]):
    """Items as they arrive."""

    def __init__(self, items: AsyncIterator[_Item]) -> None:
        self._items = items
        self._pending: Future[_Item] | None = None
        self.is_over = False
        """Whether the last item was taken."""

    def __next__(self) -> _Item:
        return self._take(self._next_future(), None)

    def poll(self, timeout_s: float) -> _Item | None:
        """The next item; None when none arrives in time, or when the stream is over."""
        if self.is_over:
            return None
        try:
            return self._take(self._next_future(), timeout_s)
        except (TimeoutError, StopIteration):
            return None

    def until_newest(self) -> Iterator[_Item]:
        """Items until none comes for a second; the stream itself would go on with later ones."""
        while (item := self.poll(_NEWEST_WAIT_S)) is not None:
            yield item
        self.close()

    def close(self) -> None:
        """Take no more."""
        self.is_over = True
        if self._pending is not None:
            self._pending.cancel()

    def _next_future(self) -> "Future[_Item]":
        if self._pending is None:
            self._pending = asyncio.run_coroutine_threadsafe(_next(self._items), _loop())
        return self._pending

    def _take(self, future: "Future[_Item]", timeout_s: float | None) -> _Item:
        try:
            item = future.result(timeout_s)
        except TimeoutError:
            # The item that was asked for is taken by a later call.
            raise
        except StopAsyncIteration:
            self.is_over = True
            raise StopIteration from None
        except BaseException:
            self.close()
            raise
        self._pending = None
        return item


def _waiting(
    method: Callable[Concatenate[AsyncCoordinator, _P], Awaitable[_Result]],
) -> Callable[Concatenate["Coordinator", _P], _Result]:
    @functools.wraps(method)
    def call(self: "Coordinator", /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        async def work() -> _Result:
            return await method(self.asynchronous, *args, **kwargs)

        return wait_for(work())

    return call


def _streaming(
    method: Callable[Concatenate[AsyncCoordinator, _P], AsyncIterator[_Item]],
) -> Callable[Concatenate["Coordinator", _P], BlockingStream[_Item]]:
    @functools.wraps(method)
    def call(self: "Coordinator", /, *args: _P.args, **kwargs: _P.kwargs) -> BlockingStream[_Item]:
        return BlockingStream(method(self.asynchronous, *args, **kwargs))

    return call


class Coordinator:
    """An open connection. Use it as a context manager; ``connect`` opens it."""

    def __init__(self, to: ConnectionTarget) -> None:
        self.target = to
        """Whom it calls, and as whom."""
        self.asynchronous = wait_for(AsyncCoordinator.open(to))
        self.address = self.asynchronous.address
        self.token_id = self.asynchronous.token_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    close = _waiting(AsyncCoordinator.close)
    submit = _waiting(AsyncCoordinator.submit)
    estimate = _waiting(AsyncCoordinator.estimate)
    continue_job = _waiting(AsyncCoordinator.continue_job)
    send_blobs = _waiting(AsyncCoordinator.send_blobs)
    create_map = _waiting(AsyncCoordinator.create_map)
    create_serve = _waiting(AsyncCoordinator.create_serve)
    models = _waiting(AsyncCoordinator.models)
    answer = _streaming(AsyncCoordinator.answer)
    results = _waiting(AsyncCoordinator.results)
    fetch_result = _waiting(AsyncCoordinator.fetch_result)
    jobs = _waiting(AsyncCoordinator.jobs)
    find_job = _waiting(AsyncCoordinator.find_job)
    job = _waiting(AsyncCoordinator.job)
    spec = _waiting(AsyncCoordinator.spec)
    watch = _streaming(AsyncCoordinator.watch)
    read_events = _streaming(AsyncCoordinator.read_events)
    pause = _waiting(AsyncCoordinator.pause)
    resume = _waiting(AsyncCoordinator.resume)
    stop = _waiting(AsyncCoordinator.stop)
    set_parameters = _waiting(AsyncCoordinator.set_parameters)
    raise_budget = _waiting(AsyncCoordinator.raise_budget)
    remove = _waiting(AsyncCoordinator.remove)
    export = _waiting(AsyncCoordinator.export)
    ledger = _waiting(AsyncCoordinator.ledger)
    receipts = _streaming(AsyncCoordinator.receipts)
    request_reclaim = _waiting(AsyncCoordinator.request_reclaim)
    reclaim = _waiting(AsyncCoordinator.reclaim)
    retry_halted = _waiting(AsyncCoordinator.retry_halted)
    nodes = _waiting(AsyncCoordinator.nodes)
    watch_telemetry = _streaming(AsyncCoordinator.watch_telemetry)
    find_node = _waiting(AsyncCoordinator.find_node)
    drain = _waiting(AsyncCoordinator.drain)
    pause_node = _waiting(AsyncCoordinator.pause_node)
    certify_api = _waiting(AsyncCoordinator.certify_api)
    label_node = _waiting(AsyncCoordinator.label_node)
    resume_node = _waiting(AsyncCoordinator.resume_node)
    revoke_node = _waiting(AsyncCoordinator.revoke_node)
    readmit_node = _waiting(AsyncCoordinator.readmit_node)
    tokens = _waiting(AsyncCoordinator.tokens)
    own_token = _waiting(AsyncCoordinator.own_token)
    register_spec_key = _waiting(AsyncCoordinator.register_spec_key)
    spec_keys = _waiting(AsyncCoordinator.spec_keys)
    revoke_spec_key = _waiting(AsyncCoordinator.revoke_spec_key)
    find_token = _waiting(AsyncCoordinator.find_token)
    create_token = _waiting(AsyncCoordinator.create_token)
    revoke_token = _waiting(AsyncCoordinator.revoke_token)
