"""Cleans up after each unit test."""

from collections.abc import Iterator

import pytest

from tests.journals import close_journals


@pytest.fixture(autouse=True)
def closed_journals() -> Iterator[None]:
    yield
    close_journals()
