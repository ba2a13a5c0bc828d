import asyncio

import pytest

from gpu_node.shell.link.concurrent import run_alongside


class BrokenError(Exception):
    """What one of them ends by."""


async def fail() -> None:
    raise BrokenError


async def for_ever(ended: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.set()


async def test_what_breaks_one_breaks_the_body_and_ends_the_others() -> None:
    ended = asyncio.Event()
    with pytest.raises(BrokenError):
        async with run_alongside(for_ever(ended), fail()):
            await asyncio.Event().wait()
    assert ended.is_set()


async def test_what_breaks_the_body_ends_the_others() -> None:
    ended = asyncio.Event()

    async def block() -> None:
        async with run_alongside(for_ever(ended)):
            await asyncio.sleep(0)
            raise BrokenError

    with pytest.raises(BrokenError):
        await block()
    assert ended.is_set()


async def test_the_end_of_the_body_ends_the_others() -> None:
    ended = asyncio.Event()
    async with run_alongside(for_ever(ended)):
        await asyncio.sleep(0)
    assert ended.is_set()


async def test_one_that_is_over_leaves_the_body_be() -> None:
    async with run_alongside(asyncio.sleep(0)):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
