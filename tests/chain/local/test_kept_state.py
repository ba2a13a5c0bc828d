"""The state of a local chain, kept for the chain that follows when it is killed."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from hypergpu.chain.local.state_file import StateKeeper
from hypergpu.chain.rpc.answers import Block
from tests.chain.ground import JOB, NODES, Ground
from tests.signed_receipts import COORDINATOR, node_key


def killed_and_started(ground: Ground, file: Path) -> Block:
    """Another chain with what was kept. Gives its first block; what it had is judged as high up."""
    height = ground.chain.head().number
    ground.anvil.kill()
    ground.anvil.options = replace(ground.anvil.options, begins_with=file)
    ground.anvil.start()
    first = ground.chain.head()
    ground.mine(height - first.number)
    return first


def test_a_chain_that_was_killed_begins_with_what_was_kept_and_pays_what_it_lacks(
    ground: Ground,
) -> None:
    file = ground.folder / "state.json"
    keeper = StateKeeper(ground.url, file)
    ground.opened()
    ground.earn(0, range(2))
    ground.until(lambda turn: turn.mined > 0)
    keeper.look()
    kept = ground.chain.head()
    assert kept.transactions

    ground.end(0)
    ground.earn(1, range(2, 3))
    ground.rest()
    # All of it is final on this chain, and some of it never was on the next one.
    assert killed_and_started(ground, file) == kept
    ground.end(1, is_last=True)
    ground.settle()
    ground.check_exact(3)
    keeper.close()


def test_a_chain_of_which_nothing_was_kept_is_built_again(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.rest()
    assert killed_and_started(ground, ground.folder / "none.json").number == 0
    ground.ask("anvil_setBalance", COORDINATOR.node_id, hex(10**24))
    ground.settle()
    ground.check_exact(2)
    assert len(ground.journal.receipts(JOB)) == 2 * len(NODES)


def looks_until_kept(keeper: StateKeeper, file: Path, before_each: Callable[[], None]) -> int:
    before = file.read_bytes()
    for looks in count(1):
        before_each()
        keeper.look()
        if file.read_bytes() != before:
            return looks
    raise AssertionError


def test_a_state_is_kept_after_each_block_as_long_as_that_takes_little_of_the_time(
    ground: Ground,
) -> None:
    file = ground.folder / "state.json"
    seconds = count()
    keeper = StateKeeper(ground.url, file, lambda: float(next(seconds)))
    keeper.look()
    assert looks_until_kept(keeper, file, ground.mine) == 20
    sender = node_key(7)
    ground.ask("anvil_setBalance", sender.node_id, hex(10**18))

    def spend() -> None:
        ground.send_as(sender)
        ground.mine()

    ground.opened()
    keeper.keep()
    assert looks_until_kept(keeper, file, spend) == 2
    keeper.close()
