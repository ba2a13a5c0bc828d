"""Measures this machine for `hypergpu doctor`."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hypergpu.command_line import program
from hypergpu.errors import HyperGPUError
from hypergpu.units import several
from hypergpu.user.cli.probe import TorchFound
from hypergpu.user.cli.verdicts import (
    FAIL,
    OK,
    PROBE_TIMEOUT_S,
    WARN,
    Check,
    api_port_check,
    blobs_check,
    blobs_failure,
    clock_check,
    control_check,
    dial_failure,
    disk_check,
    events_check,
    events_failure,
    folder_check,
    joined_ports,
    port_check,
    proxy_check,
    reach_check,
    sandbox_check,
    torch_checks,
    uplink_check,
    via_check,
    way_of,
)
from hypergpu.user.client.settings import ResolvedSetting, resolve_settings
from hypergpu.user.cluster.via import read_state
from hypergpu.user.terminal.output import is_rich
from hypergpu.wire.congestion import controls

_COLOURS = {OK: "32", WARN: "33", FAIL: "31"}
_NAME_WIDTH = 12
PORTS = (7700, 7701, 7702)
API_PORT = 8077
PYTHON_LEAST = (3, 11)


class Diagnosis(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/doctor/1"):
    """`doctor`."""

    is_fit: bool
    checks: list[Check]

    def with_checks(self, checks: Sequence[Check]) -> "Diagnosis":
        """The same with further checks."""
        is_fit = self.is_fit and all(check.verdict != FAIL for check in checks)
        return Diagnosis(is_fit, [*self.checks, *checks])


def diagnosis(blobs: str = "", events: str = "") -> Diagnosis:
    """Measure everything; takes seconds, most of them importing torch.

    Args:
        blobs: Address of the object store of a coordinator here; empty: there is none.
        events: Address of its stream of events; empty: there is none.
    """
    checks = list(_checks(resolve_settings()))
    if blobs:
        checks.append(blobs_check(blobs, blobs_failure(blobs)))
    if events:
        checks.append(events_check(events_failure(events)))
    return Diagnosis(all(check.verdict != FAIL for check in checks), checks)


def _checks(settings: dict[str, ResolvedSetting]) -> Iterator[Check]:
    yield _python_check()
    yield from torch_checks(torch_found())
    for name in ("data_dir", "state_dir"):
        folder = Path(settings[name].value).expanduser()
        yield _folder_check(name, folder)
    parent = _existing(Path(settings["state_dir"].value).expanduser())
    yield disk_check("disk", str(parent), shutil.disk_usage(parent).free)
    yield sandbox_check()
    yield clock_check(time.time(), is_synchronised=_is_synchronised())
    ours = settings["address"].value if settings["address"].origin == "up" else ""
    for port in PORTS:
        yield _port_check(port, is_local=bool(ours))
    yield api_port_check(API_PORT, is_free=_is_free(API_PORT, "127.0.0.1"))
    if (state := read_state(Path(settings["data_dir"].value).expanduser())) is not None:
        failures = (dial_failure(state.host, port) for port in state.ports)
        yield via_check(state, next(filter(None, failures), ""))
    yield proxy_check(os.environ)
    yield from _congestion_checks(settings)
    yield _coordinator_check()


def _python_check() -> Check:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if sys.version_info[:2] < PYTHON_LEAST:
        return Check("python", FAIL, version, "install Python 3.11 or later")
    return Check("python", OK, f"{version} at {sys.executable}")


def torch_found() -> TorchFound:
    """Run the probe in a process that may die."""
    try:
        process = subprocess.run(
            program("hypergpu.user.cli.probe"),
            capture_output=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TorchFound(failure=f"a kernel did not return within {PROBE_TIMEOUT_S} s")
    try:
        return msgspec.json.decode(process.stdout, type=TorchFound)
    except (msgspec.DecodeError, UnicodeError):
        lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
        last = lines[-1] if lines else "it printed nothing"
        return TorchFound(failure=f"the probe died with status {process.returncode}: {last}")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _folder_check(name: str, folder: Path) -> Check:
    if not folder.exists():
        is_writable = os.access(_existing(folder), os.W_OK)
        if is_writable:
            return Check(name, OK, f"{folder} will be made when it is needed")
        return folder_check(name, str(folder), is_writable=False, open_files=())
    try:
        names = sorted(path.name for path in folder.iterdir() if _is_open_secret(path))
    except PermissionError:
        return folder_check(name, str(folder), is_writable=False, open_files=())
    is_writable = os.access(folder, os.W_OK)
    return folder_check(name, str(folder), is_writable=is_writable, open_files=tuple(names))


def _is_open_secret(path: Path) -> bool:
    is_secret = "key" in path.name or "token" in path.name
    return is_secret and path.is_file() and bool(path.stat().st_mode & 0o077)


def _is_synchronised() -> bool | None:
    """Whether NTP keeps the clock; None when nothing here can tell."""
    if shutil.which("timedatectl") is None:
        return None
    command = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        process = subprocess.run(command, capture_output=True, timeout=5, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"yes": True, "no": False}.get(process.stdout.strip())


def _port_check(port: int, *, is_local: bool) -> Check:
    is_free = _is_free(port)
    return port_check(port, is_free=is_free, is_ours=is_local and not is_free)


def _is_free(port: int, host: str = "") -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _congestion_checks(settings: dict[str, ResolvedSetting]) -> Iterator[Check]:
    tcp_controls = controls()
    yield control_check(tcp_controls)
    host, ports = joined_ports(Path(settings["state_dir"].value).expanduser())
    for port in ports:
        yield reach_check(host, port, dial_failure(host, port))
    if host:
        yield uplink_check(host, way_of(host), tcp_controls)


def _coordinator_check() -> Check:
    from hypergpu.user.client import connect

    try:
        with connect() as coordinator:
            jobs = several(len(coordinator.jobs()), "job")
            return Check("coordinator", OK, f"{coordinator.address} answers, {jobs}")
    except HyperGPUError as error:
        return Check("coordinator", WARN, error.detail, error.fix)


def mend(checks: Sequence[Check], *, is_root: bool) -> Iterator[str]:
    """Run the commands that may be run here, and say so; those of root's are only said.

    Args:
        checks: As they came out.
        is_root: Whether this process is root's.
    """
    for check in checks:
        if check.verdict == OK or not check.command:
            continue
        if check.is_root and not is_root:
            yield f"{check.name}: as root: sudo sh -c {shlex.quote(check.command)}"
            continue
        process = subprocess.run(["/bin/sh", "-c", check.command], check=False)
        outcome = "done" if not process.returncode else f"failed with status {process.returncode}"
        yield f"{check.name}: {check.command}: {outcome}"


def verdict_line(check: Check) -> str:
    """A check with its fix, on one line."""
    mark = f"{check.verdict:<4}"
    if is_rich():
        mark = f"\x1b[{_COLOURS[check.verdict]}m{mark}\x1b[0m"
    fix = f". Fix: {check.fix}" if check.fix else ""
    return f"{mark}  {check.name:<{_NAME_WIDTH - 1}} {check.what}{fix}"
