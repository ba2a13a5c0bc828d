"""`python -m tests.kinds.coordinator`: a coordinator that drives one more kind of work."""

import sys
from typing import TYPE_CHECKING

from coordinator.__main__ import main

if TYPE_CHECKING:
    from coordinator.shell.driver.kinds import KindTable

MODULE = "tests.kinds.coordinator"


def _larger_table() -> "KindTable":
    from tests.kinds.table import KINDS_OF_TESTS

    return KINDS_OF_TESTS


if __name__ == "__main__":
    sys.exit(main(load_kinds=_larger_table))
