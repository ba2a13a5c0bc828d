import asyncio

from netsim.proxy.clock import LoopClock
from tests.integration.netsim.proxied import TIMEOUT_S


async def test_a_deed_that_fails_stops_no_other() -> None:
    loop = asyncio.get_running_loop()
    told: list[object] = []
    loop.set_exception_handler(lambda _loop, context: told.append(context.get("exception")))
    clock, is_done = LoopClock(loop), asyncio.Event()
    failure = ValueError("no such deed")

    def fail() -> None:
        raise failure

    clock.at(1000, fail)
    clock.at(2000, is_done.set)
    await asyncio.wait_for(is_done.wait(), TIMEOUT_S)
    clock.close()
    assert told == [failure]
