"""What `hypergpu doctor` says of each measure: a verdict, a sentence and a fix."""

import platform
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hypergpu.command_line import program
from hypergpu.errors import HyperGPUError
from hypergpu.sandbox import sandbox
from hypergpu.torch_wheels import LEGACY, OLDEST, is_legacy, version_of
from hypergpu.user.cli.probe import DeviceFound, TorchFound
from hypergpu.user.cluster.via import ViaState
from hypergpu.user.terminal.output import size
from hypergpu.wire.congestion import BBR, FOR_ALL, WITHOUT, Controls, RouteSettings, way_to
from hypergpu.wire.credentials import split_address

OK, WARN, FAIL = "ok", "warn", "fail"

DISK_LEAST_BYTES = 500_000_000
DISK_GOOD_BYTES = 5_000_000_000
RELEASED_UNIX_S = 1_763_000_000
"""No clock that is right shows a time before this version was made."""


class Check(msgspec.Struct, frozen=True):
    """One verdict."""

    name: str
    verdict: str
    """``ok``, ``warn`` or ``fail``."""
    what: str
    fix: str = ""
    command: str = ""
    """Shell command that applies the fix; empty: none does."""
    is_root: bool = False
    """Whether only root may run it."""


def torch_checks(found: TorchFound) -> list[Check]:
    """Torch and every device it names."""
    if found.failure:
        fix = "reinstall it: pip install --force-reinstall 'hypergpu[torch]'"
        return [
            Check("torch", FAIL, f"it is installed and cannot be imported: {found.failure}", fix)
        ]
    if not found.version:
        fix = "for torch workloads: pip install 'hypergpu[torch]'"
        return [Check("torch", WARN, "not installed: only numpy workloads can train here", fix)]
    cuda_text = f", CUDA {found.cuda}" if found.cuda else ""
    checks = [Check("torch", OK, f"{found.version}{cuda_text}")]
    return checks + [_device_check(each, found) for each in found.devices]


def _device_check(device: DeviceFound, found: TorchFound) -> Check:
    memory = f", {size(device.memory_bytes)}" if device.memory_bytes else ""
    label = f"{device.name} {device.capability}".strip()
    if not device.failure:
        return Check(device.device, OK, f"{label}{memory}: a kernel ran")
    if device.capability and not is_supported(device.capability, found.architectures):
        architectures = ", ".join(found.architectures)
        what = f"{label}: this torch was built for {architectures} only"
        fix, command = _wheel_fix(device.capability)
        return Check(device.device, FAIL, what, fix, command=command)
    fix = "update the driver; see whether nvidia-smi works; restart the machine"
    if device.device == "mps":
        fix = "update macOS and torch"
    return Check(device.device, FAIL, f"{label}: {device.failure}", fix)


def is_supported(capability: str, architectures: tuple[str, ...]) -> bool:
    """Whether a wheel built for ``architectures`` runs on a card.

    Machine code runs on the same major version from its minor version on; ``compute_`` entries are
    compiled on the spot for anything newer.
    """
    major, minor = version_of(capability)
    for architecture in architectures:
        built_major, built_minor = version_of(architecture)
        if architecture.startswith("compute_") and (built_major, built_minor) <= (major, minor):
            return True
        if architecture.startswith("sm_") and built_major == major and built_minor <= minor:
            return True
    return False


def _wheel_fix(capability: str) -> tuple[str, str]:
    """What helps a card that the installed build does not know, and the command that does it."""
    if version_of(capability) < OLDEST:
        return "this card is too old for current torch: use the CPU or another card", ""
    arguments = LEGACY if is_legacy(capability) else ("--upgrade", "torch", "torchvision")
    if is_legacy(capability) and platform.machine() != "x86_64":
        return "install the build that NVIDIA makes for this machine: docs/install.md", ""
    pip_command = shlex.join(("pip", "install", *arguments))
    return (
        f"install the build for such cards: {pip_command}",
        f"{shlex.quote(sys.executable)} -m {pip_command}",
    )


def disk_check(name: str, path: str, free_bytes: int) -> Check:
    """Room for models, updates and state."""
    what = f"{size(free_bytes)} free at {path}"
    if free_bytes < DISK_LEAST_BYTES:
        return Check(name, FAIL, what, f"free at least {size(DISK_LEAST_BYTES)} there")
    if free_bytes < DISK_GOOD_BYTES:
        return Check(name, WARN, what, "enough for small models; free some for large ones")
    return Check(name, OK, what)


def sandbox_check(wanted: sandbox.SandboxKind = sandbox.SandboxKind.AUTO) -> Check:
    """The sandbox that code of workloads would run in here. Tries it."""
    with tempfile.TemporaryDirectory(prefix="hypergpu-sandbox-") as folder:
        choice = sandbox.chosen_sandbox(wanted, sandbox.WorkerFolders((Path(folder),), (), ()))
    if choice.kind is not sandbox.SandboxKind.OFF:
        return Check("sandbox", OK, f"{choice.kind.value} starts here")
    what = choice.text.partition(". Fix: ")[0]
    return Check("sandbox", WARN, f"code of workloads would run {what}", sandbox.INSTALL_SANDBOX)


def clock_check(now_unix_s: float, *, is_synchronised: bool | None) -> Check:
    """Certificates are refused by a clock that is far off."""
    if now_unix_s < RELEASED_UNIX_S:
        what = "it is behind this program's release: certificates look not yet valid"
        return Check("clock", FAIL, what, "set the clock: timedatectl set-ntp true")
    if is_synchronised is False:
        fix = "timedatectl set-ntp true"
        what = "plausible, but nothing keeps it right"
        return Check("clock", WARN, what, fix, command=fix, is_root=True)
    return Check("clock", OK, "plausible" if is_synchronised is None else "kept right by NTP")


def port_check(port: int, *, is_free: bool, is_ours: bool) -> Check:
    """The coordinator's ports."""
    name = f"port {port}"
    if is_ours:
        return Check(name, OK, "the coordinator of this machine listens there")
    if not is_free:
        what = "another program listens there"
        return Check(name, WARN, what, "to start a coordinator here: hypergpu up --port 0")
    return Check(name, OK, "free")


def api_port_check(port: int, *, is_free: bool) -> Check:
    """The port of the API of served models."""
    if is_free:
        return Check("API port", OK, f"{port} is free for hypergpu serve")
    fix = "if it is no `hypergpu serve` of yours, take another: hypergpu serve api --port 0"
    return Check("API port", WARN, f"another program listens on {port}", fix)


def proxy_check(environment: Mapping[str, str]) -> Check:
    """Proxies are passed by: gRPC speaks HTTP/2, which home networks' proxies do not."""
    variables = [
        name
        for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
        if environment.get(name) or environment.get(name.upper())
    ]
    if not variables:
        return Check("proxy", OK, "none is set")
    what = f"{', '.join(variables)} set, and not used: hypergpu dials coordinators directly"
    return Check("proxy", OK, what)


def folder_check(name: str, path: str, *, is_writable: bool, open_files: tuple[str, ...]) -> Check:
    """Keys and tokens are their owner's alone."""
    if not is_writable:
        return Check(
            name, FAIL, f"{path} cannot be written", f"chown it, or choose another: {name}"
        )
    if open_files:
        what = f"others may read {', '.join(open_files)} in {path}"
        command = f"chmod -R go= {shlex.quote(path)}"
        return Check(name, FAIL, what, command, command=command)
    return Check(name, OK, f"{path} is yours alone")


NODE_OPTION = f"start the node as root with --congestion-control {BBR}"


class _Joined(msgspec.Struct):
    """Part of the file that names the coordinator that a node joined."""

    address: str
    bulk_port: int = 0


def joined_ports(state_dir: Path) -> tuple[str, tuple[int, ...]]:
    """Host and ports of the coordinator that this machine's node joined; empty without one."""
    try:
        content = (state_dir / "coordinator.json").read_bytes()
        joined_coordinator = msgspec.json.decode(content, type=_Joined)
        host, node_port = split_address(joined_coordinator.address)
    except (OSError, msgspec.MsgspecError, UnicodeError, HyperGPUError):
        return "", ()
    return host, tuple(port for port in (node_port, joined_coordinator.bulk_port) if port)


def reach_check(host: str, port: int, failure: str) -> Check:
    """One of the ports that a node dials at its coordinator."""
    name = "reach"
    if not failure:
        return Check(name, OK, f"the coordinator's port {port} at {host} answers")
    fix = f"see that the coordinator runs, and open TCP port {port} in its firewall and router"
    return Check(name, WARN, f"the coordinator's port {port} at {host}: {failure}", fix)


def via_check(state: ViaState, failure: str) -> Check:
    """The way through another machine that a coordinator here keeps open."""
    name = "via"
    if not state.is_up:
        return Check(name, FAIL, f"{state.there}: {state.detail}", state.fix)
    if failure:
        fix = "see whether sshd and its firewall there let others in: docs/home.md"
        return Check(name, FAIL, f"{state.there}: {state.host}: {failure}", fix)
    ports = ", ".join(str(port) for port in state.ports)
    return Check(name, OK, f"ports {ports} of {state.host} lead here")


def blobs_check(address: str, failure: str) -> Check:
    """The object store that carries bulk bytes."""
    if not failure:
        return Check("blobs", OK, f"{address} takes an object and gives it back")
    fix = "correct its address, AWS_ENDPOINT_URL_S3 and the keys: docs/storage.md"
    return Check("blobs", FAIL, f"{address}: {failure}", fix)


def blobs_failure(address: str) -> str:
    """Why an object store does not work from here; empty: it does. Blocks."""
    return _probe_failure("coordinator.shell.store.bulk.try_bucket", address)


def _probe_failure(module: str, *words: str, given: str = "") -> str:
    try:
        process = subprocess.run(
            program(module, *words),
            input=given,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it does not answer within {PROBE_TIMEOUT_S} s"
    if not process.returncode:
        return ""
    return process.stdout or (process.stderr.strip().splitlines() or ["it said nothing"])[-1]


def events_check(failure: str) -> Check:
    """The stream that gets receipts and rounds."""
    name = "events"
    if not failure:
        return Check(name, OK, "the stream takes entries")
    fix = "start it, or correct HYPERGPU_COORDINATOR_EVENTS: docs/events.md"
    return Check(name, FAIL, failure, fix)


def events_failure(address: str) -> str:
    """Why a stream of events does not work from here; empty: it does. Blocks."""
    # It may hold a password, which an argument would show to others.
    return _probe_failure("coordinator.shell.outbox.try_stream", given=address)


def dial_failure(host: str, port: int) -> str:
    """Why a TCP connection cannot be made; empty: it can. Blocks."""
    try:
        socket.create_connection((host, port), DIAL_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def way_of(host: str) -> RouteSettings | None:
    """How packets get to a host; None when it cannot be told. Blocks."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return way_to(str(addresses[0][4][0]))
    except (OSError, ValueError):
        return None


def control_check(found: Controls) -> Check:
    """What new connections of this machine get, and whether BBR is to be had."""
    name = "congestion"
    if not found.default:
        return Check(name, OK, "this system does not tell")
    if _is_bbr(found.default):
        return Check(name, OK, f"new connections get {found.default}")
    what = f"new connections get {found.default}, which slows down with each loss"
    if not found.has_bbr:
        what += f"; the kernel has {' '.join(found.available)} only"
        return Check(name, WARN, what, WITHOUT)
    what += "; bbr is there" if not found.loading else "; bbr is not loaded"
    command = found.after_loading(FOR_ALL)
    return Check(name, WARN, what, f"for all connections: {command}", command=command, is_root=True)


def uplink_check(host: str, way: RouteSettings | None, found: Controls) -> Check:
    """Congestion control of a node's updates, which this machine sends."""
    name = "uplink"
    if way is None:
        return Check(name, OK, f"the way to the coordinator {host} is not known here")
    if way.is_local:
        return Check(name, OK, f"the coordinator {host} is this machine: nothing gets lost")
    control = way.congestion_control or found.default
    what = f"updates to {host} leave through {way.device} by {control or 'what is not known'}"
    if not control or _is_bbr(control):
        return Check(name, OK, what)
    if not found.has_bbr:
        return Check(name, WARN, what, WITHOUT)
    command = f"ip route replace {' '.join(way.route(BBR))}"
    fix = f"{NODE_OPTION}; or by hand: {found.after_loading(command)}"
    return Check(name, WARN, f"{what}; for models see hypergpu doctor there", fix)


def _is_bbr(control: str) -> bool:
    return control.startswith(BBR)


PROBE_TIMEOUT_S = 180
DIAL_TIMEOUT_S = 5.0
