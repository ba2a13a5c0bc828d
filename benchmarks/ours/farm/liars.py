"""Liars in a farm job: what of their answers is accepted, and what finding them costs."""

import random
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.ours.farm.virtual_farm import (
    Answer,
    FarmFigures,
    Moment,
    Strategy,
    VirtualFarm,
    VirtualNode,
)

NODES = 100
ITEM_MS = 200.0
_GOOD_ITEMS = 1_000


def always_wrong(moment: Moment) -> Answer:
    """Answer every bundle wrongly, each time otherwise."""
    return Answer(f"lie {moment.dice.random()}", moment.positions)


def wrong_once_in_ten(moment: Moment) -> Answer:
    """Answer one bundle in ten wrongly."""
    return always_wrong(moment) if moment.dice.random() < 0.1 else Answer()


def wrong_later(moment: Moment) -> Answer:
    """Answer wrongly once a thousand items were right."""
    return always_wrong(moment) if moment.done_items >= _GOOD_ITEMS else Answer()


def wrong_alike(moment: Moment) -> Answer:
    """Answer as all others who lie so."""
    return Answer("the common lie", moment.positions)


def copy_others(moment: Moment) -> Answer:
    """Answer with what somebody answered for other items."""
    return Answer(f"copy of {moment.dice.randrange(1_000)}", moment.positions)


def wrong_in_a_twentieth(moment: Moment) -> Answer:
    """Answer one item in twenty of every bundle wrongly, at least one, side by side."""
    items = max(1, len(moment.positions) // 20)
    first = moment.dice.randrange(len(moment.positions) - items + 1)
    return Answer(f"lie {moment.dice.random()}", moment.positions[first : first + items])


class LiarCase(NamedTuple):
    """One row: who lies, and how many."""

    strategy: Strategy
    liars: int = 10
    returns_after_ban: bool = False


CASES: Mapping[str, LiarCase] = {
    "always": LiarCase(always_wrong),
    "one_in_ten": LiarCase(wrong_once_in_ten),
    "after_1000": LiarCase(wrong_later),
    "twenty_alike": LiarCase(wrong_alike, liars=20),
    "copies": LiarCase(copy_others),
    "new_names": LiarCase(always_wrong, returns_after_ban=True),
    "few_items": LiarCase(wrong_in_a_twentieth),
}


def run_case(case: LiarCase, items: int, seed: int, *, is_checked: bool = True) -> FarmFigures:
    """Run one job among 100 nodes of which none is known."""
    dice = random.Random(f"speeds {seed}")
    nodes = [
        VirtualNode(
            f"node-{number}",
            ITEM_MS * dice.uniform(0.5, 2.0),
            queues_work=True,
            strategy=case.strategy if number < case.liars else None,
        )
        for number in range(NODES)
    ]
    permille = {} if is_checked else {"checked_permille": 0}
    farm = VirtualFarm(items, nodes, seed, returns_after_ban=case.returns_after_ban, **permille)
    return farm.run()
