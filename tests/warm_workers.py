"""Workers, evaluators and bulk processes of tests: forks of two processes of the run.

One has torch loaded, without which a worker computes for four seconds before it reads its first
word; a fork of the other, which has none, costs a fifth of what its program takes to start. A fork
confines itself as a worker does that landlock confines; bubblewrap is tried by the tests that name
it. Each process starts by itself where `HYPERGPU_TESTS_WARM=0` says so.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.hooks.warm_client import LIGHT_VARIABLE, WARM_VARIABLE
from benchmarks.ours.warm import HOOKS, LIGHT_MODULES, TORCH_MODULES, fork_server

ROOT = Path(__file__).parent.parent
RUN_VARIABLE = "HYPERGPU_TESTS_WARM"
"""0: there are no forks. From its start on it names the servers' folder to the run's processes."""
_STARTERS = ("tests/browser/", "tests/chaos/", "tests/conformance/", "tests/integration/")
"""Folders of tests that start workers or evaluators."""
_LIGHT_STARTERS = (*_STARTERS, "tests/kinds/")
"""Folders of tests that start coordinators, and so bulk processes."""
_TORCH, _LIGHT = "torch", "light"
UNFORKED = {LIGHT_VARIABLE: ""}
"""Variables of a process whose bulk processes, or workers without torch, are started by themselves:
a test signals or measures them.
"""
_LANDLOCK_VERSION = (444, None, 0, 1)  # landlock_create_ruleset(2)


def is_wanted() -> bool:
    """Whether this process, the first one of a run, is to have such a server."""
    return os.environ.get(RUN_VARIABLE) != "0"


class WarmWorkers:
    """The servers of a run, started when tests that need them were collected."""

    def __init__(self) -> None:
        """Name their folder to all processes of the run."""
        self._opened = ExitStack()
        self._folder = self._opened.enter_context(_folder())
        os.environ[RUN_VARIABLE] = str(self._folder)

    def start_for(self, node_ids: Iterable[str]) -> None:
        """Start each once, where one of the tests needs it."""
        node_ids = [*node_ids]
        for name, modules, starters in (
            (_TORCH, TORCH_MODULES, _STARTERS),
            (_LIGHT, LIGHT_MODULES, _LIGHT_STARTERS),
        ):
            is_needed = any(each.startswith(starters) for each in node_ids)
            self._start(name, modules, is_needed=is_needed)

    def _start(self, name: str, modules: Sequence[str], *, is_needed: bool) -> None:
        path = self._folder / name
        if is_needed and not path.exists():
            self._opened.enter_context(fork_server(str(path), modules))

    def close(self) -> None:
        """End them."""
        self._opened.close()


@contextmanager
def _folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="hypergpu-warm-") as folder:
        yield Path(folder)


def warm_variables() -> dict[str, str]:
    """Variables of processes whose children are such forks, if wanted."""
    path = os.environ.get(RUN_VARIABLE, "")
    if path in {"", "0"} or ctypes.CDLL(None).syscall(*_LANDLOCK_VERSION) < 1:
        return {"PYTHONPATH": str(ROOT)}
    return {
        WARM_VARIABLE: str(Path(path) / _TORCH),
        LIGHT_VARIABLE: str(Path(path) / _LIGHT),
        "PYTHONPATH": f"{HOOKS}{os.pathsep}{ROOT}",
        "HYPERGPU_NODE_SANDBOX": "landlock",
        "HYPERGPU_COORDINATOR_EVALUATOR_SANDBOX": "landlock",
    }
