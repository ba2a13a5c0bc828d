"""The table of kinds of tests: the product's, with one more."""

from coordinator.shell.kinds.table import KINDS
from tests.kinds.echo.shell.entry import ECHO_ENTRY

KINDS_OF_TESTS = KINDS.with_kind(ECHO_ENTRY)
