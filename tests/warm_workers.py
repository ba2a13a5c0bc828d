"""Torch workers and evaluators of tests: forks of one process of the run that has torch loaded.

`HYPERGPU_TESTS_WARM=1` has it so. A torch worker computes for four seconds before it reads its
first word. A fork confines itself as a worker does that landlock confines; bubblewrap is not tried
then.
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
"""Set: workers are forks. From then on it names the server's socket to all processes of the run."""
_STARTERS = ("tests/browser/", "tests/chaos/", "tests/conformance/", "tests/integration/")
"""Folders of tests that start workers or evaluators."""
_LANDLOCK_VERSION = (444, None, 0, 1)  # landlock_create_ruleset(2)


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
    if not path or ctypes.CDLL(None).syscall(*_LANDLOCK_VERSION) < 1:
        return {"PYTHONPATH": str(ROOT)}
    return {
        WARM_VARIABLE: path,
        "PYTHONPATH": f"{HOOKS}{os.pathsep}{ROOT}",
        "HYPERGPU_NODE_SANDBOX": "landlock",
        "HYPERGPU_COORDINATOR_EVALUATOR_SANDBOX": "landlock",
    }
