"""Torch workers and evaluators of tests: forks of one process of the run that has torch loaded.

A torch worker computes for four seconds before it reads its first word. A fork confines itself as
the worker does that landlock confines; bubblewrap has tests of its own.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.ours.warm import HOOKS, WARM_VARIABLE, fork_server

ROOT = Path(__file__).parent.parent
_RUN_VARIABLE = "HYPERGPU_TESTS_WARM"
"""Names the server's socket to the workers of a run."""
_STARTERS = ("tests/browser/", "tests/chaos/", "tests/conformance/", "tests/integration/")
"""Folders of tests that start workers or evaluators."""
_LANDLOCK_VERSION = (444, None, 0, 1)  # landlock_create_ruleset(2)

COLD = {WARM_VARIABLE: ""}
"""For processes whose workers are to start by themselves: their memory or their own end counts."""


class WarmWorkers:
    """The server of a run, started when tests that need it were collected."""

    def __init__(self) -> None:
        """Name its socket to all processes of the run."""
        self._opened = ExitStack()
        self._path = self._opened.enter_context(_folder()) / "server"
        os.environ[_RUN_VARIABLE] = str(self._path)

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
    """Variables of processes whose torch workers and evaluators are such forks."""
    if ctypes.CDLL(None).syscall(*_LANDLOCK_VERSION) < 1:
        return {"PYTHONPATH": str(ROOT)}
    return {
        WARM_VARIABLE: os.environ.get(_RUN_VARIABLE, ""),
        "PYTHONPATH": f"{HOOKS}{os.pathsep}{ROOT}",
        "HYPERGPU_NODE_SANDBOX": "landlock",
        "HYPERGPU_COORDINATOR_EVALUATOR_SANDBOX": "landlock",
    }
