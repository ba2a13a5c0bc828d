"""Ray at the ends of the lines that netsim holds open: its head at the hub, a worker a node.

Run by `netsim shape`; prints items a second, by tasks of 50 items and of one. Where Ray does not
start or does not end its tasks in time, it prints the last words of Ray's own processes instead.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import ray

from benchmarks.peers.line_items import (
    WARM_UP_ITEMS,
    RayBlocked,
    RayOutcome,
    RayRates,
    line_texts,
)
from benchmarks.peers.measured import running
from gpu_node.shell.worker.farm.checksum import item_checksum
from gpu_node.shell.worker.farm.chunk_items import TextItem
from hypergpu.sites import Sites, told_sites

ROOT = Path(__file__).parents[2]
BUNDLE_ITEMS = 50
SINGLES_SHARE = 4
"""A task an item is measured on one item of so many: it takes longer."""
_PORT = 6379
_STORE_BYTES = 100_000_000
_START_S = 150.0
_TASKS_S = 150.0
_LOOK_EVERY_S = 0.5
_PATIENCE = {
    # 60 s each else. What Ray 2.60 gives its agents beside them is 15 s and cannot be set: a
    # machine that is busy with other work ends it there.
    "RAY_raylet_start_wait_time_s": "150",
    "RAY_worker_register_timeout_seconds": "150",
}
_ADDRESS_OF = (
    "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
    " s.connect((sys.argv[1], 9)); print(s.getsockname()[0])"
)


class BlockedError(Exception):
    """Ray did not do over the lines what was asked; the text has its own words."""


@ray.remote
def answer(texts: Sequence[str], floor_ms: int) -> list[str]:
    """Answer items as our worker does: one after the other, each with its least time."""
    values = []
    for text in texts:
        due_s = time.monotonic() + floor_ms / 1000
        values.append(str(item_checksum(TextItem(0, text), 1).value))
        time.sleep(max(0.0, due_s - time.monotonic()))
    return values


def start_command(prefix: Sequence[str], host: str, log: Path, flags: Sequence[str]) -> list[str]:
    """What starts one of Ray's nodes at its end, with what it says in a file."""
    starter = str(Path(sys.executable).with_name("ray"))
    words = [starter, "start", "--block", "--disable-usage-stats", f"--node-ip-address={host}"]
    words += [f"--object-store-memory={_STORE_BYTES}", *flags]
    return [*prefix, "sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1', "sh", str(log), *words]


def own_address(prefix: Sequence[str], hub: str) -> str:
    """Address of a node's end, as the hub sees it."""
    command = [*prefix, sys.executable, "-c", _ADDRESS_OF, hub]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def last_words(folder: Path) -> str:
    """What each of Ray's starters said last, and what ended its daemons."""
    ends = [
        f"{log.stem}: {lines[-1] if lines else 'nothing'}"
        for log in sorted(folder.glob("*.log"))
        for lines in [_lines(log)]
    ]
    errors = sorted(folder.glob("ray/session_latest/logs/raylet*.err"))
    return "; ".join(
        [*ends, *(f"{log.name}: {lines[0]}" for log in errors if (lines := _lines(log)))]
    )


def _lines(log: Path) -> list[str]:
    lines = log.read_text("utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def wait_for(folder: Path, what: str, is_there: Iterator[bool]) -> None:
    """Look until it is there.

    Raises:
        BlockedError: It is not after the limit, with Ray's last words.
    """
    give_up_s = time.monotonic() + _START_S
    for is_so in is_there:
        if is_so:
            return
        if time.monotonic() > give_up_s:
            raise BlockedError(f"{what} within {_START_S:g} s; {last_words(folder)}")
        time.sleep(_LOOK_EVERY_S)


def _says_started(log: Path) -> Iterator[bool]:
    while True:
        yield log.exists() and "Ray runtime started" in log.read_text("utf-8")


def _has_workers(count: int) -> Iterator[bool]:
    while True:
        yield ray.cluster_resources().get("CPU", 0) >= count


@contextmanager
def ray_over(sites: Sites, folder: Path) -> Iterator[None]:
    """A driver with its head at the hub and one worker at each node's end."""
    hub = sites.coordinator.dials
    head_flags = ["--head", f"--port={_PORT}", "--num-cpus=0", "--include-dashboard=false"]
    head = start_command((), hub, folder / "head.log", [*head_flags, f"--temp-dir={folder}/ray"])
    flags = [f"--address={hub}:{_PORT}", "--num-cpus=1"]
    workers = [
        start_command(
            site.prefix, own_address(site.prefix, hub), folder / f"worker-{name}.log", flags
        )
        for name, site in sites.nodes.items()
    ]
    with ExitStack() as stack:
        stack.enter_context(running([head]))
        wait_for(folder, "Ray's head did not start", _says_started(folder / "head.log"))
        try:
            ray.init(address=f"{hub}:{_PORT}", _node_ip_address=hub, log_to_driver=False)
        except (ConnectionError, RuntimeError) as error:
            raise BlockedError(f"Ray's driver: {error}; {last_words(folder)}") from error
        stack.callback(ray.shutdown)
        # One after the other: two that start at once on one machine choose the same sockets.
        for count, worker in enumerate(workers, 1):
            stack.enter_context(running([worker]))
            wait_for(folder, f"Ray's worker {count} did not join", _has_workers(count))
        yield


def rate(folder: Path, texts: Sequence[str], floor_ms: int, task_items: int) -> float:
    """Items a second of tasks of so many, which are all given to Ray at once.

    Raises:
        BlockedError: They broke, or did not end within the limit.
    """
    begin_s = time.monotonic()
    tasks = [
        answer.remote(texts[start : start + task_items], floor_ms)
        for start in range(0, len(texts), task_items)
    ]
    try:
        values = [value for each in ray.get(tasks, timeout=_TASKS_S) for value in each]
    except ray.exceptions.RayError as error:
        words = str(error).strip().splitlines()[0]
        what = f"tasks of {task_items}: {words}; {last_words(folder)}"
        raise BlockedError(what) from error
    seconds = time.monotonic() - begin_s
    if values != [item_checksum(TextItem(0, text), 1).value for text in texts]:
        raise SystemExit("Ray's values are not those of the items")
    return len(texts) / seconds


def outcome_over(sites: Sites, folder: Path, items: int, floor_ms: int) -> RayOutcome:
    """Rates over the lines, or why there are none."""
    try:
        with ray_over(sites, folder):
            rate(folder, line_texts(WARM_UP_ITEMS * len(sites.nodes), items), floor_ms, 1)
            bundles = rate(folder, line_texts(items), floor_ms, BUNDLE_ITEMS)
            singles = rate(folder, line_texts(items // SINGLES_SHARE), floor_ms, 1)
    except BlockedError as error:
        return RayBlocked(str(error))
    return RayRates(bundles, singles)


def main(items: int, floor_ms: int) -> None:
    """Measure over the lines of the environment."""
    sites = told_sites()
    if sites is None:
        raise SystemExit("no lines are open: run it by `hypergpu netsim shape`")
    # Ray's processes import what they call from here.
    os.environ.update(_PATIENCE, PYTHONPATH=str(ROOT))
    # Short, as sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        outcome = outcome_over(sites, Path(name), items, floor_ms)
    sys.stdout.write(msgspec.json.encode(outcome).decode() + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
