"""`python -m hypergpu.engine.ray_driver ADDRESS` has Ray compute batches of tasks.

A process of its own: Ray pickles, trusts its network, and ends a driver whose cluster is gone. What
goes through it are bytes. ADDRESS is ``ray``, which starts one on this machine, or ``ray://...``.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from hypergpu.engine.child import BatchResults, Opened, TaskBatch
from hypergpu.engine.tasks import EngineTask, compute_encoded, encode_task
from hypergpu.frames import frame, read_frame

_TRIES = 2
_TOKEN_FILE = Path.home() / ".ray" / "auth_token"
_STORE_BYTES = 100 << 20
"""Shared memory of a Ray of our own: results are digests."""

Submit = Callable[[EngineTask], Any]
"""Begins a task; the result is Ray's reference."""


def main() -> int:
    """Compute until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    turn = threading.Lock()

    def answer(message: Opened | BatchResults) -> None:
        with turn:
            answers.write(frame(msgspec.msgpack.encode(message)))
            answers.flush()

    if read_frame(sys.stdin.buffer) is None:
        return 0
    submit, reply = _open(sys.argv[1])
    answer(reply)
    if submit is None:
        return 1
    batches = msgspec.msgpack.Decoder(TaskBatch)
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        arguments = submit, batches.decode(payload), answer
        threading.Thread(target=_answer_batch, args=arguments, daemon=True).start()
    return 0


def _open(address: str) -> tuple[Submit | None, Opened]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if _TOKEN_FILE.exists():
        # A head that finds this file asks for the token; a client shows it only if it is told to.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    ray: Any = import_module("ray")
    try:
        if address == "ray":
            own = {"num_cpus": os.cpu_count(), "object_store_memory": _STORE_BYTES}
            ray.init(address="local", include_dashboard=False, log_to_driver=False, **own)
        else:
            ray.init(address=address, log_to_driver=False)
        resources = ray.cluster_resources()
    except Exception as away:  # noqa: BLE001 - a start that takes too long raises Exception itself
        return None, Opened(failure=(str(away).splitlines() or [type(away).__name__])[0])
    on_cpu = ray.remote(num_cpus=1, max_retries=_TRIES)(compute_encoded)
    on_gpu = on_cpu.options(num_gpus=1) if resources.get("GPU", 0) >= 1 else on_cpu

    def submit(task: EngineTask) -> Any:
        return (on_gpu if task.wants_gpu else on_cpu).remote(encode_task(task))

    return submit, Opened(max(1, int(resources.get("CPU", 1))))


def _answer_batch(submit: Submit, batch: TaskBatch, answer: Callable[[BatchResults], None]) -> None:
    try:
        answer(BatchResults(batch.number, _results(submit, batch.tasks)))
    except Exception as away:  # noqa: BLE001 - Ray has no base class for a cluster that is gone
        sys.stderr.write(f"Ray is gone: {away}\n")
        os._exit(1)


def _results(submit: Submit, tasks: list[EngineTask]) -> list[bytes | None]:
    ray: Any = import_module("ray")
    began_s = time.monotonic()
    results: list[bytes | None] = []
    for task, reference in [(each, submit(each)) for each in tasks]:
        left_s = max(0.0, began_s + task.limit_s - time.monotonic())
        try:
            results.append(bytes(ray.get(reference, timeout=left_s)))
        except ray.exceptions.RayError as error:
            sys.stderr.write(f"a task of Ray was lost: {error}\n")
            ray.cancel(reference)
            results.append(None)
    return results


if __name__ == "__main__":
    sys.exit(main())
