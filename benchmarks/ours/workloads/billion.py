"""A job of a billion parameters through plan, fold and export, by real processes on one machine.

The null workload trains nothing, so that what is measured is everything around training.
"""

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.table import PartFigures
from coordinator.shell.store.blobs.writing import sync_file
from hypergpu.jobfile.spec import CodecChoice, JobSpec, TrainingSettings
from hypergpu.tensors.codec import update_bytes
from hypergpu.user.client import JobEvent
from hypergpu.workloads.layouts import numpy_layout
from hypergpu.workloads.registry import build, find

PARAMETERS, QUICK_PARAMETERS = 1_000_000_000, 20_000_000
ROUNDS = 2
_LOOK_EVERY_S = 0.2
_PIECE_BYTES = 1 << 20
_DISK_FACTOR = 10
"""Most models of float32 that all processes together keep on disk."""


class BillionOutcome(NamedTuple):
    """What such a job took."""

    round_s: float
    export_s: float
    disk_s: float
    """Reading and writing a round's bytes, and no more, on the same disk."""
    peak_bytes: Mapping[str, int]
    """Highest resident size of each side's processes, each at its own time, added up."""


def billion_figures(*, is_quick: bool) -> PartFigures:
    """Measure the job, beside the disk that it goes through.

    Raises:
        BenchmarkError: The disk is too small, or the job did not finish.
    """
    parameters = QUICK_PARAMETERS if is_quick else PARAMETERS
    with tempfile.TemporaryDirectory(prefix="hypergpu-billion-") as name:
        _require_space(Path(name), _DISK_FACTOR * 4 * parameters)
        disk_s = round_of_disk_s(Path(name), parameters)
        outcome = run_job(Path(name), parameters, disk_s)
    gigabytes = {side: size / 1e9 for side, size in outcome.peak_bytes.items()}
    over_disk = outcome.round_s / outcome.disk_s
    rows = [
        (
            f"{parameters / 1e6:,.0f}M parameters, int4: a round, of its bytes on this disk",
            f"{outcome.disk_s:.1f} s",
            f"{outcome.round_s:.1f} s",
            f"{over_disk:.1f}x",
            f"exported in {outcome.export_s:.1f} s",
        ),
        _memory_row("coordinator", gigabytes, "2 GB wanted"),
        _memory_row("node", gigabytes, ""),
    ]
    metrics = {
        "billion_round_s": outcome.round_s,
        "billion_round_over_disk": over_disk,
        "billion_export_s": outcome.export_s,
        "billion_coordinator_gb": gigabytes["coordinator"],
        "billion_node_gb": gigabytes["node"],
    }
    note = (
        "The disk's time: reading model, parameters, momentum, update and delta once, and writing"
        f" and syncing them once, as a round does. Load: {os.getloadavg()[0]:.1f}."
    )
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


def _memory_row(side: str, gigabytes: Mapping[str, float], wanted: str) -> tuple[str, ...]:
    return (
        f"its peak memory: {side} with its processes",
        "",
        f"{gigabytes[side]:.2f} GB",
        "",
        wanted,
    )


def run_job(folder: Path, parameters: int, disk_s: float) -> BillionOutcome:
    """Train and export, while each process's peak is watched."""
    spec = JobSpec(
        workload="null",
        options={"parameters": parameters},
        training=TrainingSettings(rounds=ROUNDS, inner_steps=1, nodes=1),
        codec=CodecChoice(up="int4", down="int4"),
    )
    with running(folder, is_plaintext=False) as cluster:
        [node] = cluster.add_nodes(1, "null")
        sides = {"coordinator": cluster.coordinator.pid, "node": node.pid}
        with watched_peaks(sides) as peaks:
            round_s, export_s = _train_and_export(cluster, spec)
    by_side = {side: sum(peaks[side].values()) for side in sides}
    return BillionOutcome(round_s, export_s, disk_s, by_side)


def _train_and_export(cluster: Running, spec: JobSpec) -> tuple[float, float]:
    with cluster.client() as client:
        job_id = client.submit(spec)
        at_s = {"NodeJoined": [0.0], "ModelInitialised": [0.0], "RoundRecorded": []}
        for update in client.watch(job_id):
            if isinstance(update, JobEvent) and update.kind in at_s:
                at_s[update.kind].append(update.at_ms / 1000)
        job = client.job(job_id).job
        if job.phase != "finished":
            raise BenchmarkError(f"the job is {job.phase}: {job.reason}")
        began_s = max(at_s["NodeJoined"][-1], at_s["ModelInitialised"][-1])
        round_s = (at_s["RoundRecorded"][-1] - began_s) / ROUNDS
        started_s = time.monotonic()
        client.export(job_id, cluster.folder / "export")
        return round_s, time.monotonic() - started_s


@contextmanager
def watched_peaks(roots: Mapping[str, int]) -> Iterator[Mapping[str, dict[int, int]]]:
    """Follow the highest resident size of some processes and all that they start, by process."""
    peaks: dict[str, dict[int, int]] = {side: {} for side in roots}
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(_LOOK_EVERY_S):
            for side, root in roots.items():
                for process_id in _family(root):
                    peak = peak_bytes_of(process_id)
                    peaks[side][process_id] = max(peak, peaks[side].get(process_id, 0))

    look_thread = threading.Thread(target=look)
    look_thread.start()
    try:
        yield peaks
    finally:
        is_over.set()
        look_thread.join()


def _family(root: int) -> list[int]:
    try:
        process = psutil.Process(root)
        return [root, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def peak_bytes_of(process_id: int) -> int:
    """A process's highest resident size so far; 0 where it has ended."""
    try:
        text = Path(f"/proc/{process_id}/status").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes_kb = [line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")]
    return 1024 * int(sizes_kb[0]) if sizes_kb else 0


def round_of_disk_s(folder: Path, parameters: int) -> float:
    """Read and write once what a round has to, in pieces, and sync it."""
    layout = numpy_layout(build(find("null"), {"parameters": parameters}))
    sent_bytes = update_bytes(layout, "int4")
    total_bytes = 3 * layout.model_bytes + 2 * sent_bytes
    path, piece = folder / "disk", os.urandom(_PIECE_BYTES)
    started_s = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-total_bytes // _PIECE_BYTES)):
            file.write(piece)
    sync_file(path)
    with path.open("rb", buffering=0) as file:
        while file.read(_PIECE_BYTES):
            pass
    took_s = time.monotonic() - started_s
    path.unlink()
    return took_s


def _require_space(folder: Path, wanted_bytes: int) -> None:
    free_bytes = psutil.disk_usage(str(folder)).free
    if free_bytes < wanted_bytes:
        raise BenchmarkError(
            f"{folder} has {free_bytes / 1e9:.0f} GB free, and {wanted_bytes / 1e9:.0f} are needed"
        )
