"""A command line with a home of its own, and a service to talk to."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hypergpu.user.cli.main import app
from tests.unit.cli.fake_service import FakeService, operator_token, serving

Hypergpu = Callable[..., Result]


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str | None]:
    """No settings but what a test gives."""
    return {
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "HYPERGPU_CONFIG": None,
        "HYPERGPU_ADDRESS": None,
        "HYPERGPU_TOKEN_FILE": None,
        "HYPERGPU_TOKEN": None,
        "HYPERGPU_TIMEOUT_S": None,
        "HYPERGPU_DATA_DIR": None,
        "HYPERGPU_STATE_DIR": None,
    }


@pytest.fixture
def alone(environment: dict[str, str | None]) -> Hypergpu:
    """The command on a machine that knows no coordinator."""

    def run(*words: str, **variables: str | None) -> Result:
        return CliRunner().invoke(app, list(words), env={**environment, **variables})

    return run


@pytest.fixture
def hypergpu(service: FakeService, alone: Hypergpu) -> Iterator[Hypergpu]:
    """The command with a token for a coordinator that answers."""
    with serving(service) as port:

        def run(*words: str, **variables: str | None) -> Result:
            return alone(*words, HYPERGPU_TOKEN=operator_token(port), **variables)

        yield run
