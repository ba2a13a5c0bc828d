"""Workers and evaluators that need not import torch: forks of a process that has done it once.

Importing torch takes three seconds of a core, and a run with eight nodes does it nine times before
its first round. Times count from the first round, so warm starts change no figure; runs in which
killed nodes come back must start cold.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from hypergpu.command_line import program
from hypergpu.leash import leash_command

HOOKS = Path(__file__).parents[1] / "hooks"
WARM_VARIABLE = "HYPERGPU_BENCH_WARM"
_ORDER_BYTES = 1 << 17
_READY = b"ready\n"


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
    with TemporaryDirectory(prefix="hypergpu-warm-") as folder:
        path = str(Path(folder) / "server")
        server = subprocess.Popen(
            leash_command(program("benchmarks.ours.warm", path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # As nodes of a cluster have it: these libraries count their threads when imported.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        try:
            if server.stdout is None or server.stdout.readline() != _READY:
                raise RuntimeError("the server of warm starts did not come up")
            # A fork is made outside any sandbox.
            variables = {WARM_VARIABLE: path, "PYTHONPATH": str(HOOKS)}
            with changed_environment({**variables, "HYPERGPU_NODE_SANDBOX": "off"}):
                yield
        finally:
            server.terminate()
            server.wait()
            for pipe in (server.stdin, server.stdout):
                if pipe is not None:
                    pipe.close()


def serve(path: str) -> NoReturn:
    """Fork once for each order that comes in."""
    import coordinator.shell.evaluator.answer  # noqa: F401  # Loading it is the purpose.
    import gpu_node.shell.worker.loop
    import gpu_node.shell.worker.torch_engine
    import gpu_node.shell.worker.trainers  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the forks.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.buffer.write(_READY)
        sys.stdout.flush()
        while True:
            client, _ = listener.accept()
            with client:
                order, descriptors, *_ = socket.recv_fds(client, _ORDER_BYTES, 3)
                if os.fork() == 0:
                    listener.close()
                    _run(order, descriptors, client)
                for descriptor in descriptors:
                    os.close(descriptor)


def _run(raw: bytes, descriptors: list[int], client: socket.socket) -> NoReturn:
    """Become the program that was ordered."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        order = json.loads(raw)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["folder"])
        sys.argv = [order["module"], *order["arguments"]]
        threading.Thread(target=_end_with, args=(client,), daemon=True).start()
        exit_at_end = os._exit

        def report(status: int) -> NoReturn:
            client.send(bytes([status & 0xFF]))
            exit_at_end(status)

        os._exit = report
        runpy.run_module(order["module"], run_name="__main__")
        status = 0
    except SystemExit as program_exit:
        status = (
            program_exit.code
            if isinstance(program_exit.code, int)
            else int(program_exit.code is not None)
        )
    finally:
        sys.stderr.flush()
        os._exit(status)


def _end_with(client: socket.socket) -> None:
    """End when the process that this one stands for is gone."""
    client.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
