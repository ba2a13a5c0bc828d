"""Rules of names and structure; ``python -m benchmarks.house --offenders PATH`` lists breaches."""

import pytest

from benchmarks.house.offenders import RULES
from benchmarks.house.tree import one_per_line


@pytest.mark.parametrize("rule", RULES)
def test_nothing_breaks_a_rule(rule: str) -> None:
    found = [str(offender) for offender in RULES[rule]()]
    assert not found, one_per_line(found)
