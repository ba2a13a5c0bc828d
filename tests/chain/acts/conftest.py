from pathlib import Path

import pytest

from tests.chain.acts.hands import Hands
from tests.chain.ground import Ground


@pytest.fixture
def hands(ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hands:
    """A job is open, and everybody's keys are locked in a home of their own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return Hands(ground.opened())
