"""Rules that the tree does not yet keep everywhere: the number of breaches may only shrink.

``python -m benchmarks.house --offenders PATH`` lists them.
"""

import json
from pathlib import Path

import pytest

from benchmarks.house.offenders import RULES
from benchmarks.house.tree import one_per_line

LIMITS = json.loads(Path(__file__).with_name("ratchet.json").read_text("utf-8"))


def test_every_rule_has_its_limit() -> None:
    assert LIMITS.keys() == RULES.keys()


@pytest.mark.parametrize("rule", RULES)
def test_breaches_of_a_rule_only_become_fewer(rule: str) -> None:
    found = [str(offender) for offender in RULES[rule]()]
    assert len(found) <= LIMITS[rule], one_per_line(found)
