"""What conformance suites share because it is dear to make."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypergpu.engine.engine import Engine, LocalEngine
from hypergpu.engine.ray_engine import RayEngine
from tests.conformance.journal_stores import (
    DATABASES,
    POSTGRES_URL,
    STORES,
    JournalStore,
    postgres_schema,
)
from tests.conformance.worker_process import ShardKit, Subject


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """An empty PostgreSQL schema; empty text where no test asks for one."""
    if not POSTGRES_URL:
        yield ""
        return
    with postgres_schema() as url:
        yield url


@pytest.fixture(params=DATABASES)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_url: str
) -> Iterator[JournalStore]:
    """Each journal, empty."""
    with STORES[request.param](tmp_path, postgres_url) as journal_store:
        yield journal_store


@pytest.fixture(scope="session", params=["local", pytest.param("ray", marks=pytest.mark.full)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine; Ray's is to lose nothing to this machine."""
    task_engine: Engine = LocalEngine(2) if request.param == "local" else RayEngine("ray")
    yield task_engine
    task_engine.close()
    if isinstance(task_engine, RayEngine):
        assert task_engine.lost_count == 0, "Ray did not compute"


@pytest.fixture
def kit(tmp_path: Path, subject: Subject) -> ShardKit:
    """The files of one shard of a suite's subject."""
    return ShardKit(tmp_path, subject)
