from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chain.ground import Ground, hand_made


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    with hand_made(tmp_path) as made:
        yield made
