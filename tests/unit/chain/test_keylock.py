"""A key's lock leaves no file, and taking the file away lets no second writer in."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hypergpu.chain.keylock import KeyLock
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Address

NAME = (31337, Address("0x" + "12" * 20))
WRITERS = 6
TRIES = 500
STEPS = 20
"""With the key in hand, at each of which another may come."""


def test_a_lock_that_is_given_back_leaves_no_file(tmp_path: Path) -> None:
    held = KeyLock(tmp_path, *NAME)
    assert [path.name for path in tmp_path.iterdir()] == [f"31337-{NAME[1]}.lock"]
    held.release()
    assert list(tmp_path.iterdir()) == []
    KeyLock(tmp_path, *NAME).release()


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads that give way to one another between any two steps."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_of_many_that_come_and_go_one_has_the_key_at_a_time(tmp_path: Path) -> None:
    holders: list[int] = []

    def come_and_go(writer: int) -> int:
        times = 0
        for _ in range(TRIES):
            try:
                held = KeyLock(tmp_path, *NAME)
            except HyperGPUError:
                continue
            holders.append(writer)
            for _ in range(STEPS):
                os.sched_yield()
                assert holders == [writer]
            holders.remove(writer)
            held.release()
            times += 1
        return times

    with ThreadPoolExecutor(WRITERS) as threads:
        times = list(threads.map(come_and_go, range(WRITERS)))
    assert sum(times) > WRITERS
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_somebody_else_put_there_is_not_taken_away(tmp_path: Path) -> None:
    first = KeyLock(tmp_path, *NAME)
    (path,) = tmp_path.iterdir()
    path.unlink()
    second = KeyLock(tmp_path, *NAME)
    first.release()
    with pytest.raises(HyperGPUError, match="by another process"):
        KeyLock(tmp_path, *NAME)
    second.release()
