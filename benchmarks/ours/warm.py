"""Workers and evaluators that need not import torch: forks of a process that has done it once.

Importing torch takes three seconds of a core, and a run with eight nodes does it nine times before
its first round. Times count from the first round, so warm starts change no figure; runs in which
killed nodes come back must start cold.
"""

import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.hooks.warm_client import LIBRARIES, STATUS_BYTES, WARM_VARIABLE
from hypergpu.command_line import program
from hypergpu.leash import leash_command

HOOKS = Path(__file__).parents[1] / "hooks"
_ORDER_BYTES = 1 << 17
_SIGNAL_BYTES = 1 << 10
_DESCRIPTORS_MOST = 16
_UNUSED_FROM = 500
"""Numbers of descriptors from which no program has any."""
TORCH_MODULES = (
    "coordinator.shell.evaluator.answer",
    "gpu_node.shell.worker.loop",
    "gpu_node.shell.worker.torch_engine",
    "gpu_node.shell.worker.trainers",
    # Each takes seconds; they load their parts when these are named.
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
    "peft",
)
"""What programs load that are to come warm; no module that is run as a program is among them."""


LIGHT_MODULES = (
    "coordinator.shell.rate",
    "coordinator.shell.store.bulk.server",
    "gpu_node.shell.worker.loop",
    "gpu_node.shell.worker.numpy_trainer",
    "gpu_node.shell.worker.performers",
)
"""What programs load that need no torch."""


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, and of those that it starts, while the block runs."""
    earlier_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, earlier_value in earlier_values.items():
            if earlier_value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = earlier_value


@contextmanager
def warm_starts() -> Iterator[None]:
    """Serve forks to the processes that are started while the block runs."""
    with tempfile.TemporaryDirectory(prefix="hypergpu-warm-") as folder:
        path = str(Path(folder) / "server")
        with fork_server(path):
            variables = {WARM_VARIABLE: path, "PYTHONPATH": str(HOOKS), **LIBRARIES}
            # bubblewrap hides the server; a fork that is told to confines itself.
            with changed_environment({**variables, "HYPERGPU_NODE_SANDBOX": "off"}):
                yield


@contextmanager
def fork_server(path: str, modules: Sequence[str] = TORCH_MODULES) -> Iterator[None]:
    """A server of forks at a path, where it answers as soon as it has loaded these modules."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(socket.SOMAXCONN)
        server = subprocess.Popen(
            leash_command(program("benchmarks.ours.warm", str(listener.fileno()), *modules)),
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            env={**os.environ, **LIBRARIES},
        )
    try:
        yield
    finally:
        server.terminate()
        server.wait()


class WarmServer:
    """Forks once for each order, ends forks whose clients are gone, and tells how others ended."""

    def __init__(self, listener: socket.socket, modules: Sequence[str]) -> None:
        """Load what the programs load.

        Raises:
            RuntimeError: A library has started a thread, which no fork would have.
        """
        for module in modules:
            importlib.import_module(module)
        if (threads := len([*Path("/proc/self/task").iterdir()])) > 1:
            raise RuntimeError(f"a process with {threads} threads cannot be forked")
        gc.collect()
        gc.freeze()
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, socket.socket] = {}
        """Clients of the forks that live, by process id."""

    def serve(self) -> NoReturn:
        """Take orders until the process is ended."""
        wake_end, signal_end = socket.socketpair()
        for end in (wake_end, signal_end):
            end.setblocking(False)
        signal.set_wakeup_fd(signal_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(wake_end, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._take_order((wake_end, signal_end))
                elif key.fileobj is wake_end:
                    wake_end.recv(_SIGNAL_BYTES)
                    self._tell_statuses()
                else:
                    self._end_fork(key.data)

    def _take_order(self, ends: tuple[socket.socket, ...]) -> None:
        client, _ = self._listener.accept()
        raw_order, descriptors, *_ = socket.recv_fds(client, _ORDER_BYTES, _DESCRIPTORS_MOST)
        if not raw_order:
            client.close()
            return
        process_id = os.fork()
        if process_id == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for each in (self._listener, client, *ends, *self._clients.values()):
                each.close()
            _run(json.loads(raw_order), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._clients[process_id] = client
        self._selector.register(client, selectors.EVENT_READ, process_id)

    def _end_fork(self, process_id: int) -> None:
        """End a fork as the process that it stands for was ended."""
        if process_id in self._clients:
            os.kill(process_id, signal.SIGKILL)
            self._selector.unregister(self._clients[process_id])

    def _tell_statuses(self) -> None:
        while self._clients:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if not process_id:
                return
            with self._clients.pop(process_id) as client:
                with suppress(KeyError):
                    self._selector.unregister(client)
                with suppress(OSError):
                    client.send(status.to_bytes(STATUS_BYTES, "big"))


def _run(order: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Become the program that was ordered."""
    status = 1
    try:
        _take_descriptors(descriptors, order["descriptors"])
        os.environ.clear()
        os.environ.update(order["environment"])
        os.umask(order["umask"])
        os.chdir(order["folder"])
        tempfile.tempdir = None  # Read anew.
        sys.argv = [order["module"], *order["arguments"]]
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as program_exit:
        code = program_exit.code
        status = code if isinstance(code, int) else int(code is not None)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def _take_descriptors(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Let descriptors have the numbers by which the program knows them."""
    # What came may have a number that another one is to have.
    duplicates = [fcntl.fcntl(each, fcntl.F_DUPFD, _UNUSED_FROM) for each in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for duplicate, number in zip(duplicates, numbers, strict=True):
        os.dup2(duplicate, number)
        os.close(duplicate)


if __name__ == "__main__":
    WarmServer(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]).serve()
