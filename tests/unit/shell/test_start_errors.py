"""The sentence that a coordinator ends with."""

import psycopg
from sqlalchemy.exc import OperationalError

from coordinator.shell.app.start_errors import start_error
from hypergpu.errors import HyperGPUError, Reason

CLOSED = "server closed the connection unexpectedly\n\tThis probably means the server terminated"


def database_failure() -> OperationalError:
    return OperationalError("INSERT", {}, psycopg.OperationalError(CLOSED))


def test_a_database_that_ends_is_one_sentence_with_its_fix_whoever_meets_it_first() -> None:
    alone = start_error(database_failure())
    assert alone is not None
    assert alone.message == (
        "the journal cannot be used: server closed the connection unexpectedly."
        " Fix: start the database again, then the coordinator"
    )
    both = start_error(ExceptionGroup("tasks", [database_failure(), database_failure()]))
    assert both is not None
    assert both.message == alone.message


def test_a_defect_beside_it_stays_a_defect() -> None:
    assert start_error(ExceptionGroup("tasks", [database_failure(), KeyError("x")])) is None


def test_a_numbered_error_is_told_as_it_is() -> None:
    error = HyperGPUError(Reason.ADDRESS_UNUSABLE, "port 7700 is taken")
    assert start_error(ExceptionGroup("tasks", [error])) is error
