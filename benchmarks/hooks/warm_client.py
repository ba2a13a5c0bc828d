"""The starting end of `benchmarks.ours.warm`: a fork of a warm server does this process's work."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

WARM_VARIABLE = "HYPERGPU_WORKER_WARM"
"""Names the socket of a server of forks that has torch loaded."""
LIGHT_VARIABLE = "HYPERGPU_WORKER_LIGHT_WARM"
"""Names the socket of one that has no torch, for programs that load none."""
COMMANDS_VARIABLE = "HYPERGPU_COMMANDS_WARM"
"""1: commands are forks of the server that has torch. No signal but SIGKILL reaches them."""
LIBRARIES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables that libraries read while they are loaded, as the server has them."""
STATUS_BYTES = 4
_PROGRAMS = ("gpu_node.shell.worker", "coordinator.shell.evaluator")
"""Programs that load torch."""
_LIGHT_PROGRAMS = ("coordinator.shell.store.bulk",)
_COMMANDS = ("hypergpu.user.cli",)
_LIGHT_KINDS = frozenset({"null", "numpy"})
_STATUS_LOST = 1
_HOOKS = str(Path(__file__).parent)


def _served_program(arguments: list[str]) -> tuple[str, str]:
    """The module to be run, and the server that has what it loads; empty: none has."""
    if "-m" not in arguments:
        return "", ""
    module, *words = arguments[arguments.index("-m") + 1 :]
    is_light_worker = module.endswith(".worker") and not _LIGHT_KINDS.isdisjoint(words)
    if is_light_worker or module in _LIGHT_PROGRAMS:
        return module, os.environ.get(LIGHT_VARIABLE, "")
    is_command = module in _COMMANDS and os.environ.get(COMMANDS_VARIABLE) == "1"
    if is_command or module in _PROGRAMS:
        return module, os.environ.get(WARM_VARIABLE, "")
    return "", ""


def _inherited_descriptors() -> list[int]:
    """Descriptors that this program was given beside the standard ones."""
    numbers = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    inherited_numbers = []
    for number in sorted(numbers):
        try:
            if number > 2 and os.get_inheritable(number):
                inherited_numbers.append(number)
        except OSError:
            pass  # It listed the folder.
    return inherited_numbers


def hand_over() -> None:
    """Let a fork of a warm server run this program, wait for it and exit with its status.

    Returns only where this is another program, imports from other places, or no server listens.
    """
    arguments = sys.orig_argv[1:]
    module, path = _served_program(arguments)
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    libraries = {name: os.environ.get(name) for name in LIBRARIES}
    is_alike = {*folders} <= {_HOOKS, str(Path(_HOOKS).parents[1])} and libraries == LIBRARIES
    if not (module and path and is_alike):
        return
    mask = os.umask(0o077)
    os.umask(mask)
    descriptors = [0, 1, 2, *_inherited_descriptors()]
    order = {
        "module": module,
        "descriptors": descriptors,
        "arguments": arguments[arguments.index(module) + 1 :],
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "umask": mask,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        try:
            server.connect(path)
        except OSError:
            return
        socket.send_fds(server, [json.dumps(order).encode()], descriptors)
        # The fork has these now; as long as we held them, nobody would see their end.
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            raw_status = server.recv(STATUS_BYTES)
        except OSError:
            raw_status = b""
    status = int.from_bytes(raw_status, "big")
    if raw_status and os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status) if raw_status else _STATUS_LOST)
