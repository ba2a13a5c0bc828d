"""Torch workers and evaluators of tests: forks of one process of the run that has torch loaded.

A torch worker computes for four seconds before it reads its first word. A fork confines itself as a
worker does that landlock confines; bubblewrap is tried by the tests that name it. Each process
starts by itself where `HYPERGPU_TESTS_WARM=0` says so.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.hooks.warm_client import WARM_VARIABLE
from benchmarks.ours.warm import HOOKS, fork_server

ROOT = Path(__file__).parent.parent
RUN_VARIABLE = "HYPERGPU_TESTS_WARM"
"""0: there are no forks. From its start on it names the server's socket to the run's processes."""
_STARTERS = ("tests/browser/", "tests/chaos/", "tests/conformance/", "tests/integration/")
"""Folders of tests that start workers or evaluators."""
_LANDLOCK_VERSION = (444, None, 0, 1)  # landlock_create_ruleset(2)


def is_wanted() -> bool:
    """Whether this process, the first one of a run, is to have such a server."""
    return os.environ.get(RUN_VARIABLE) != "0"


class WarmWorkers:
    """The server of a run, started when tests that need it were collected."""

    def __init__(self) -> None:
        """Name its socket to all processes of the run."""
        self._opened = ExitStack()
        self._path = self._opened.enter_context(_folder()) / "server"
        os.environ[RUN_VARIABLE] = str(self._path)

    def start_for(self, node_ids: Iterable[str]) -> None:
        """Start it once, where one of the tests needs it."""
        if not self._path.exists() and any(each.startswith(_STARTERS) for each in node_ids):
            self._opened.enter_context(fork_server(str(self._path)))

    def close(self) -> None:
        """End it."""
        self._opened.close()


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="hypergpu-warm-") as folder:
        yield Path(folder)


def warm_variables() -> dict[str, str]:
    """Variables of processes whose torch workers and evaluators are such forks, if wanted."""
    path = os.environ.get(RUN_VARIABLE, "")
    if path in {"", "0"} or ctypes.CDLL(None).syscall(*_LANDLOCK_VERSION) < 1:
        return {"PYTHONPATH": str(ROOT)}
    return {
        WARM_VARIABLE: path,
        "PYTHONPATH": f"{HOOKS}{os.pathsep}{ROOT}",
        "HYPERGPU_NODE_SANDBOX": "landlock",
        "HYPERGPU_COORDINATOR_EVALUATOR_SANDBOX": "landlock",
    }
