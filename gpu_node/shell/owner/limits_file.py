"""The owner's limits on a machine: read from the node's folder, watched while the daemon runs."""

import asyncio
import os
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import structlog

from gpu_node.core.limits import (
    LimitValueError,
    MachineReading,
    OwnerLimits,
    Refusal,
    is_used_by_others,
    owner_limits,
    refusal_of_work,
)
from gpu_node.shell.owner.own_data import check_places
from gpu_node.shell.worker_host.spare import SpareWorker
from hypergpu.assignment import FailureCause
from hypergpu.clock import monotonic_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.process import memory_of, tree_of
from hypergpu.units import Milliseconds

log = structlog.get_logger()

OWNER_FILE = "node.toml"
_FORMER_FILE = "limits.toml"
_SETTINGS = "settings"
"""Table of the file that is no limit: the daemon's settings."""
_FILE_BYTES_MAX = 64 << 10
_READ_EVERY_S = 5.0
_WATCH_EVERY_S = 0.25
_ASK_S = 10.0


def load_limits(folder: Path, flags: Sequence[str]) -> OwnerLimits:
    """The limits in a node's folder, with those that ``KEY=VALUE`` flags set instead.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, one of them is wrong, or this machine cannot keep it;
            FILE_UNUSABLE, the file cannot be read.
    """
    path, file_settings = folder / OWNER_FILE, _read_owner_file(folder)
    file_settings.pop(_SETTINGS, None)
    flag_limits: dict[str, object] = {}
    for word in flags:
        key, separator, value = word.partition("=")
        if not separator:
            detail = f"--limit {word[:80]!r} is no KEY=VALUE, such as disk=50GB"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail)
        flag_limits[key.strip()] = value.strip()
    try:
        owner_limits(flag_limits, "--limit")
        limits = owner_limits(
            file_settings | flag_limits, str(path) if file_settings else "--limit"
        )
    except LimitValueError as wrong:
        raise HyperGPUError(Reason.ARGUMENT_INVALID, str(wrong), fix=_FIX) from wrong
    _check_gpu(limits)
    check_places(limits.data, folder)
    return limits


def written_settings(folder: Path) -> dict[str, object]:
    """The daemon's settings that the owner wrote, by their names.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, they are no table; FILE_UNUSABLE, the file cannot be read.
    """
    settings = _read_owner_file(folder).get(_SETTINGS, {})
    if not isinstance(settings, dict) or "state_dir" in settings:
        detail = f"{folder / OWNER_FILE}: [{_SETTINGS}] is a table of settings but state_dir"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=_FIX)
    return settings


def _read_owner_file(folder: Path) -> dict[str, object]:
    path, former = folder / OWNER_FILE, folder / _FORMER_FILE
    if former.exists():
        detail = f"{former} is no longer read: its name is {OWNER_FILE} now"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=f"mv {former} {path}")
    try:
        return tomllib.loads(_text(path)) if path.exists() else {}
    except tomllib.TOMLDecodeError as wrong:
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"{path}: {wrong}") from wrong


_FIX = "correct it: docs/node.md lists limits and settings"


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path} is larger than 64 KiB")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path}: {error}") from error


def _check_gpu(limits: OwnerLimits) -> None:
    """Check that limits of a GPU name one that is there."""
    if limits.power_w and not gpu_figures("enforced.power.limit", limits.gpu):
        detail = "power is limited, and nvidia-smi tells no GPU's power limit here"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=_FIX)
    if limits.gpu not in {"", "none"} and not gpu_figures("index", limits.gpu):
        detail = f"gpu is {limits.gpu}, and nvidia-smi knows no such GPU here"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="list them: nvidia-smi -L")


def gpu_figures(figure: str, gpu: str, subject: str = "gpu") -> list[str]:
    """What nvidia-smi says, a line for each GPU or program; nothing where it cannot be asked."""
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    command = [program, f"--query-{subject}={figure}", "--format=csv,noheader,nounits"]
    command += [f"--id={gpu}"] if gpu not in {"", "none"} else []
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in process.stdout.splitlines() if process.returncode == 0]


def found_gpus() -> list[str]:
    """This machine's CUDA devices, of those that CUDA_VISIBLE_DEVICES names where it is set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [word.strip() for word in visible.split(",") if word.strip()]
    return gpu_figures("index", "")


def check_coordinator(limits: OwnerLimits, address: str, authority: str) -> None:
    """Check that the owner allows a coordinator, before anything is sent to it.

    Raises:
        HyperGPUError: OWNER_COORDINATOR, the owner does not.
    """
    if not limits.allow_coordinator(address, authority):
        detail = f"{address} is none of its owner's coordinators: {', '.join(limits.coordinators)}"
        raise HyperGPUError(Reason.OWNER_COORDINATOR, detail)


def gpu_environment(limits: OwnerLimits) -> dict[str, str]:
    """Variables by which a worker sees the owner's GPU alone."""
    if not limits.gpu:
        return {}
    visible = "" if limits.gpu == "none" else limits.gpu
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": visible}


def refusal_error(refusal: Refusal) -> HyperGPUError:
    """A limit as an error with its number."""
    return HyperGPUError(Reason[refusal.number], refusal.detail)


class MachineReader:
    """Reads the machine as far as the limits ask. Blocks."""

    def __init__(self, limits: OwnerLimits) -> None:
        self._limits = limits
        self._before = self._processor_s()
        self._busy_ms: Milliseconds | None = None

    def refusal(self) -> Refusal | None:
        """Why the owner lets the node do nothing now."""
        reading = self._read()
        if is_used_by_others(reading):
            self._busy_ms = reading.at_ms
        return refusal_of_work(self._limits, reading, self._busy_ms)

    def _read(self) -> MachineReading:
        local = time.localtime()
        reading = MachineReading(monotonic_ms(), local.tm_hour * 60 + local.tm_min)
        if self._limits.power_w:
            watts = gpu_figures("enforced.power.limit", self._limits.gpu)
            known_watts = [float(each) for each in watts if each.replace(".", "", 1).isdecimal()]
            reading = reading._replace(power_w=max(known_watts, default=0.0))
        if self._limits.only_when_idle:
            is_gpu_shared = self._is_gpu_shared()
            reading = reading._replace(
                others_share=self._others_share(), is_gpu_shared=is_gpu_shared
            )
        return reading

    def _others_share(self) -> float:
        before, self._before = self._before, self._processor_s()
        passed_s, used_s, own = (now - then for now, then in zip(self._before, before, strict=True))
        return max(0.0, (used_s - own) / passed_s) if passed_s > 0 else 0.0

    def _processor_s(self) -> tuple[float, float, float]:
        """Seconds of all processors so far, those that were used, and those by this node."""
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        whole_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return whole_s, whole_s - idle_s, _used_s(tree_of(os.getpid()))

    def _is_gpu_shared(self) -> bool:
        own = {each.pid for each in tree_of(os.getpid())}
        process_ids = gpu_figures("pid", self._limits.gpu, "compute-apps")
        return any(int(each) not in own for each in process_ids if each.isdecimal())


def _used_s(processes: Sequence[psutil.Process]) -> float:
    total_s = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total_s += times.user + times.system
    return total_s


async def watch_owner(limits: OwnerLimits, say: Callable[[str], None]) -> None:
    """Say, whenever it changes, why the owner lets the node do nothing; empty: it may work."""
    if not (limits.hours or limits.only_when_idle or limits.power_w):
        return
    reader, last_reason = MachineReader(limits), ""
    while True:
        refusal = await asyncio.to_thread(reader.refusal)
        reason = str(refusal_error(refusal)) if refusal else ""
        if reason != last_reason:
            last_reason = reason
            say(reason)
        await asyncio.sleep(_READ_EVERY_S)


async def watch_worker(
    limits: OwnerLimits,
    process_id: Callable[[], int | None],
    kept_bytes: Callable[[], int],
    end: Callable[[str, FailureCause], None],
    *,
    spare: SpareWorker | None = None,
) -> None:
    """End a worker that takes more memory or disk than the owner allows.

    Args:
        limits: The owner's.
        process_id: Id of the worker; None while there is none.
        kept_bytes: Bytes on disk of what the node keeps and the worker writes; blocks.
        end: Ends the worker for a reason and a cause.
        spare: Ends before the worker where both take more than is allowed.
    """
    while limits.memory_bytes or limits.disk_bytes:
        await asyncio.sleep(_WATCH_EVERY_S)
        if (worker := process_id()) is None:
            continue
        taken_bytes = await asyncio.to_thread(memory_of, worker) if limits.memory_bytes else 0
        if limits.memory_bytes and spare is not None and (reserve := spare.process_id):
            both = taken_bytes + await asyncio.to_thread(memory_of, reserve)
            if both > limits.memory_bytes:
                spare.kill()
        if taken_bytes > limits.memory_bytes:
            cause = FailureCause.OUT_OF_MEMORY
            detail = f"it took {taken_bytes} bytes, its owner allows {limits.memory_bytes}"
            end(f"{cause.value}: {detail}", cause)
        file_bytes = await asyncio.to_thread(kept_bytes) if limits.disk_bytes else 0
        if file_bytes > limits.disk_bytes:
            detail = (
                f"its files take {file_bytes} bytes of disk, its owner allows {limits.disk_bytes}"
            )
            end(str(HyperGPUError(Reason.OWNER_DISK, detail)), FailureCause.OWNER)
