"""Programs whose imports are done: forks of a process that has them, one such process a test run.

Importing what a coordinator or a daemon is made of takes most of the CPU of a test that starts
them. A fork has its own process id, session, descriptors, environment and command line, as a
program that was executed has; only its modules were loaded before.
"""

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.hooks.warm_client import LIBRARIES
from benchmarks.ours.warm import HOOKS
from hypergpu.command_line import program
from hypergpu.leash import leash_command
from hypergpu.privacy import public_environment
from hypergpu.user.cluster.processes import start

ROOT = Path(__file__).parent.parent
_TESTS = ROOT / "tests"
_MODULES = (
    "coordinator.shell.app.startup",
    "coordinator.shell.gateway.app",
    "coordinator.shell.kinds.table",
    "gpu_node.shell.daemon.app",
    "gpu_node.shell.daemon.machine",
)
"""What the programs load first; no module that is run as a program is among them."""
_ORDER_BYTES = 1 << 17
_READY = b"ready"
_INTEGER_BYTES = 8
_TITLE_BYTES = 4096
"""Room for the command line of a fork, which takes the place of the server's own."""
_POPEN: Any = subprocess.Popen
"""Typed so that what the standard library keeps private may be named: how a child is executed and
waited for is all that differs in a fork.
"""
_EXECUTE_CHILD = inspect.signature(_POPEN._execute_child)


class ForkedProcess(_POPEN):  # type: ignore[misc]
    """A child that the server of forks made. Its exit status comes from there, too."""

    def _execute_child(self, *positional: Any) -> None:
        """Let the server fork in place of executing the command."""
        parts = _EXECUTE_CHILD.bind(self, *positional).arguments
        status_end, served_end = os.pipe()
        descriptors = [parts["p2cread"], parts["c2pwrite"], parts["errwrite"]]
        standard = [number if each < 0 else each for number, each in enumerate(descriptors)]
        order = {
            "command": list(parts["args"]),
            "environment": dict(parts["env"]),
            "folder": str(Path.cwd()),
        }
        try:
            server = _server()
            raw_order = json.dumps(order).encode()
            if len(raw_order) > _ORDER_BYTES:
                raise RuntimeError(f"an order to fork has {len(raw_order)} bytes")
            socket.send_fds(server, [raw_order], [*standard, served_end])
            self.pid = int.from_bytes(server.recv(_INTEGER_BYTES), "big")
            if not self.pid:
                raise RuntimeError("the server of forks has ended")
        except BaseException:
            os.close(status_end)
            raise
        finally:
            os.close(served_end)
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(parts[name] for name in pipes))
        self._status_end = status_end
        self._child_created = True

    def _internal_poll(self, _deadstate: int | None = None, *_: object) -> int | None:
        """Status of a child that has ended; None: it lives, or another thread waits for it."""
        status: int | None = self.returncode
        if status is None and self._waitpid_lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    self._read_status(os.WNOHANG)
            finally:
                self._waitpid_lock.release()
            status = self.returncode
        return status

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As of `os.waitpid`; called with the lock held."""
        status = self._read_status(wait_flags)
        return (0, 0) if status is None else (self.pid, status)

    def _read_status(self, wait_flags: int) -> int | None:
        is_there, _, _ = select.select(
            [self._status_end], [], [], 0 if wait_flags & os.WNOHANG else None
        )
        if not is_there:
            return None
        raw_status = os.read(self._status_end, _INTEGER_BYTES)
        os.close(self._status_end)
        if not raw_status:
            raise RuntimeError("the server of forks has ended")
        status = int.from_bytes(raw_status, "big")
        self._handle_exitstatus(status)
        return status


def start_program(
    command: Sequence[str],
    *,
    secret: str | None = None,
    log: Path,
    is_read: bool = False,
    environment: Mapping[str, str],
) -> subprocess.Popen[str]:
    """As `hypergpu.user.cluster.processes.start`, by a fork where that is as good."""
    if not _is_forkable(command, environment):
        return start(command, secret=secret, log=log, is_read=is_read, environment=environment)
    with log.open("ab") as sink:
        child = ForkedProcess(
            command,
            stdin=subprocess.PIPE if secret is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_read else sink,
            stderr=sink,
            text=True,
            start_new_session=True,
            env={**public_environment(), **environment},
        )
    if secret is not None and child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(secret + "\n")
            child.stdin.close()
    return child


def _is_forkable(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a fork imports from the same places and its libraries have the same settings."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    libraries = {name: environment.get(name) for name in LIBRARIES}
    # What only adds modules, as a plugin of the tests does, a fork adds to its path.
    others = {*folders} - {str(HOOKS), str(ROOT)}
    are_added = str(ROOT) in folders and all(Path(each).is_relative_to(_TESTS) for each in others)
    return are_added and libraries == LIBRARIES and command[1:3] == ["-P", "-m"]


@cache
def _server() -> socket.socket:
    """The connection to this process's server of forks, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = program("tests.program_forks", str(theirs.fileno()), "-" * _TITLE_BYTES)
        process = subprocess.Popen(
            leash_command(command),
            pass_fds=[theirs.fileno()],
            env={
                **os.environ,
                **LIBRARIES,
                "PYTHONPATH": str(ROOT),
                "GRPC_VERBOSITY": "NONE",
            },
        )
    if ours.recv(_INTEGER_BYTES) != _READY:
        raise RuntimeError("the server of forks did not come up")

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class ForkServer:
    """Forks once for each order, and tells how each fork ended."""

    def __init__(self, connection: socket.socket) -> None:
        """Load what the programs load.

        Raises:
            RuntimeError: A library has started a thread, which no fork would have.
        """
        for module in _MODULES:
            importlib.import_module(module)
        if (threads := len([*Path("/proc/self/task").iterdir()])) > 1:
            raise RuntimeError(f"a process with {threads} threads cannot be forked")
        gc.collect()
        gc.freeze()
        self._connection = connection
        self._wake_end, self._signal_end = os.pipe()
        self._status_ends: dict[int, int] = {}

    def serve(self) -> None:
        """Take orders until the connection closes."""
        for end in (self._wake_end, self._signal_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._signal_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._connection.send(_READY)
        orders, wake_end = self._connection.fileno(), self._wake_end
        is_connected = True
        while is_connected:
            ready, _, _ = select.select([orders, wake_end], [], [])
            if wake_end in ready:
                os.read(wake_end, _ORDER_BYTES)
                self._tell_statuses()
            if orders in ready:
                is_connected = self._take_order()

    def _take_order(self) -> bool:
        """Whether there was one."""
        order, descriptors, *_ = socket.recv_fds(self._connection, _ORDER_BYTES, 4)
        if not order:
            return False
        process_id = os.fork()
        if process_id == 0:
            self._forget()
            _run(order, descriptors)
        *standard, status_end = descriptors
        for descriptor in standard:
            os.close(descriptor)
        self._status_ends[process_id] = status_end
        self._connection.send(process_id.to_bytes(_INTEGER_BYTES, "big"))
        return True

    def _forget(self) -> None:
        """Leave a fork nothing of the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._connection.close()
        for each in (self._wake_end, self._signal_end, *self._status_ends.values()):
            os.close(each)

    def _tell_statuses(self) -> None:
        while self._status_ends:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if not process_id:
                return
            status_end = self._status_ends.pop(process_id)
            # Nobody may wait for it any more.
            with contextlib.suppress(BrokenPipeError):
                os.write(status_end, status.to_bytes(_INTEGER_BYTES, "big"))
            os.close(status_end)


def _run(raw_order: bytes, descriptors: list[int]) -> NoReturn:
    """Become the program that was ordered."""
    status = 1
    try:
        command = _take_place(json.loads(raw_order), descriptors)
        _, _, _, module, *arguments = command
        sys.orig_argv, sys.argv = command, [module, *arguments]
        _show_command_line(command)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as program_exit:
        status = _status_of(program_exit)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException as error:  # noqa: BLE001 - as the interpreter ends a program
        traceback.print_exception(error)
    _end(status)


def _take_place(order: dict[str, Any], descriptors: list[int]) -> list[str]:
    """Take the order's session, descriptors, environment and folder; gives its command."""
    os.setsid()
    *standard, status_end = descriptors
    os.close(status_end)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    for descriptor in standard:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*folders, *(each for each in sys.path if each not in folders)]
    return list(order["command"])


def _status_of(program_exit: SystemExit) -> int:
    if program_exit.code is None or isinstance(program_exit.code, int):
        return program_exit.code or 0
    sys.stderr.write(f"{program_exit.code}\n")
    return 1


def _end(status: int) -> NoReturn:
    """End as an interpreter does that has run its program: threads, then what is registered."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _show_command_line(command: Sequence[str]) -> None:
    """Write a command line over this process's own, where lists of processes read it."""
    fields = Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    words = array.array("B", "\0".join(command).encode())
    size = min(len(words), end - begin - 1)
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, words.tobytes(), size)


if __name__ == "__main__":
    ForkServer(socket.socket(fileno=int(sys.argv[1]))).serve()
