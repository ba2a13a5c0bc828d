"""The table of kinds of tests: the product's, with one more."""

from tests.kinds.echo.shell.entry import ECHO_ENTRY

from coordinator.shell.kinds.table import KINDS

KINDS_OF_TESTS = KINDS.with_kind(ECHO_ENTRY)
