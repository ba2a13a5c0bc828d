"""`python -m hypergpu.engine.ray_driver ADDRESS` has Ray compute batches of tasks.

A process of its own: Ray pickles, trusts its network, and ends a driver whose cluster is gone. What
goes through it are bytes. ADDRESS is ``ray``, which starts one on this machine, or ``ray://...``.
"""

import os
import signal
import sys
import time
from importlib import import_module
from typing import Any

import msgspec

from hypergpu.engine.child import BatchResults, Opened, TaskBatch
from hypergpu.engine.tasks import compute_encoded
from hypergpu.streams import frame, read_frame

_TRIES = 2
_BATCH_S = 600
"""Seconds for a batch. This machine computes the rest, as where no worker is free."""
_STORE_BYTES = 100 << 20
"""Shared memory of a Ray of our own: results are digests."""


def main() -> int:
    """Compute until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    batches = msgspec.msgpack.Decoder(TaskBatch)
    remote: Any = None
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        answer: Opened | BatchResults
        if remote is None:
            remote, answer = _open(sys.argv[1])
        else:
            answer = BatchResults(_results(remote, batches.decode(payload).tasks))
        answers.write(frame(msgspec.msgpack.encode(answer)))
        answers.flush()
        if remote is None:
            return 1
    return 0


def _open(address: str) -> tuple[Any, Opened]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = import_module("ray")
    try:
        if address == "ray":
            own = {"num_cpus": os.cpu_count(), "object_store_memory": _STORE_BYTES}
            ray.init(address="local", include_dashboard=False, log_to_driver=False, **own)
        else:
            ray.init(address=address, log_to_driver=False)
    except Exception as away:  # noqa: BLE001 - a start that takes too long raises Exception itself
        return None, Opened(failure=(str(away).splitlines() or [type(away).__name__])[0])
    workers = max(1, int(ray.cluster_resources().get("CPU", 1)))
    return ray.remote(num_cpus=1, max_retries=_TRIES)(compute_encoded), Opened(workers)


def _results(remote: Any, tasks: list[bytes]) -> list[bytes | None]:
    ray: Any = import_module("ray")
    asked = [remote.remote(task) for task in tasks]
    give_up_s = time.monotonic() + _BATCH_S
    results: list[bytes | None] = []
    for each in asked:
        try:
            left_s = max(0.0, give_up_s - time.monotonic())
            results.append(bytes(ray.get(each, timeout=left_s)))
        except (ray.exceptions.RayError, ConnectionError) as lost:
            sys.stderr.write(f"a task of Ray was lost: {lost}\n")
            ray.cancel(each)
            results.append(None)
    return results


if __name__ == "__main__":
    sys.exit(main())
