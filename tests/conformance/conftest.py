"""What conformance suites share because it is dear to make."""

from collections.abc import Iterator

import pytest

from tests.conformance.journal_stores import POSTGRES_URL, postgres_schema

collect_ignore = [] if POSTGRES_URL else ["test_postgresql_lock.py"]


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """An empty PostgreSQL schema; empty text where no test asks for one."""
    if not POSTGRES_URL:
        yield ""
        return
    with postgres_schema() as url:
        yield url
