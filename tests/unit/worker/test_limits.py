import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def start(environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "gpu_node.shell.worker", "--kind", "null"],
        cwd=ROOT,
        env={"PATH": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HYPERGPU_WORKER_THREADS", "many"),
        ("HYPERGPU_WORKER_THREADS", "0"),
        ("HYPERGPU_WORKER_MEMORY_BYTES", "-1"),
    ],
)
def test_a_cap_that_is_no_number_stops_the_worker_with_its_name(name: str, value: str) -> None:
    ended = start({name: value})
    assert ended.returncode == 2
    assert f"{name} is {value!r}; it must be a whole number".encode() in ended.stderr
