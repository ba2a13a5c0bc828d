"""Networks of network namespaces: made under a locked record, entered, and always removed.

A run writes down the namespaces that it makes. The owner and its helper process hold a lock on that
record. The kernel drops the lock when both are gone, however they ended, so a record that can be
locked names leftovers. Process ids would be reused.
"""

import asyncio
import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from netsim.emulation.requests import LinkRequest
from netsim.link import NetsimError, Way
from netsim.measure.lateness import Lateness
from netsim.measure.probe import ProbedLink, ProbePath

COORDINATOR = "coordinator"
FOLDER = Path("/run/netns")
RECORDS = Path("/run/netsim")
SETTINGS = {
    "net/ipv6/conf/all/disable_ipv6": "1",
    # Linux's usual limits, which the transfer model assumes: one connection then stops at some
    # 250 Mbit/s when the RTT is 100 ms.
    "net/ipv4/tcp_wmem": "4096 16384 4194304",
    "net/ipv4/tcp_rmem": "4096 131072 6291456",
    # What one connection learnt about a path must not decide how the next one starts.
    "net/ipv4/tcp_no_metrics_save": "1",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SLOTS = 1000
_CLONE_NEWNET = 0x40000000
_KILLS = 200
_KILL_WAIT_S = 0.01
_EVERYWHERE = "0.0.0.0"  # noqa: S104 - in a namespace that only the network reaches
_PROBE_PORT = 5001
_libc = ctypes.CDLL(None, use_errno=True)


class NamespaceHost(NamedTuple):
    """One end of a network: a name, an address and a namespace."""

    name: str
    address: str
    namespace: str

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that runs this one inside; the process that it starts becomes it."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


def host_address(number: int) -> str:
    """Return the address of the host with this number; 1 is the coordinator's."""
    return f"10.77.{number >> 8}.{number & 255}"


class NamespaceNetwork(ABC):
    """Hosts in namespaces and links between them, for as long as the context is open."""

    def __init__(self, name: str, nodes: Iterable[str]) -> None:
        _require_names(nodes)
        self._name = name
        self._claim: SlotClaim | None = None
        self.hosts: Mapping[str, NamespaceHost] = {}

    async def __aenter__(self) -> Self:
        make_task = asyncio.create_task(asyncio.to_thread(self._make))
        try:
            try:
                await asyncio.shield(make_task)
            finally:
                # A cancelled caller waits: nobody would remove what the thread makes later.
                await asyncio.wait([make_task])
        except BaseException:
            await self._remove()
            raise
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self._remove()

    def host(self, name: str) -> NamespaceHost:
        """Return a node, or ``coordinator``."""
        if name not in self.hosts:
            host_list = ", ".join(self.hosts) or "none, it is not open"
            raise NetsimError(f"the {self._name} has no host {name!r}", f"its hosts: {host_list}")
        return self.hosts[name]

    @abstractmethod
    async def obey(self, request: LinkRequest) -> object:
        """Carry out a request and return the answer.

        Raises:
            NetsimError: It cannot be done.
        """

    @abstractmethod
    async def lateness(self) -> Lateness | None:
        """Return how late the network was so far; None: it cannot be late."""

    def probe(self, node: str) -> ProbedLink:
        """Return the link of a node, to be measured; its verdicts are about the whole network."""
        ways: dict[Way, tuple[NamespaceHost, NamespaceHost]] = {
            "up": (self.host(node), self.host(COORDINATOR)),
            "down": (self.host(COORDINATOR), self.host(node)),
        }
        paths = {
            way: ProbePath(
                at_sender=sender.command,
                at_receiver=receiver.command,
                receiver=(_EVERYWHERE, _PROBE_PORT),
                target=(receiver.address, _PROBE_PORT),
            )
            for way, (sender, receiver) in ways.items()
        }
        return ProbedLink(paths, self.lateness)

    @abstractmethod
    def _make(self) -> None:
        """Check the machine, claim namespaces, make them. Runs in a thread."""

    def _claim_namespaces(self, extra: Sequence[str], nodes: Iterable[str]) -> "SlotClaim":
        """Claim a slot and make a namespace for each host and each extra name."""
        remove_leftovers()
        claim = self._claim = claim_slot()
        prefix = f"netsim-{claim.slot}"
        self.hosts = {
            name: NamespaceHost(name, host_address(number), f"{prefix}-{name}")
            for number, name in enumerate([COORDINATOR, *nodes], start=1)
        }
        claim.make([*(f"{prefix}.{name}" for name in extra), *_names(self.hosts.values())])
        return claim

    async def _remove(self) -> None:
        claim, self._claim = self._claim, None
        self.hosts = {}
        if claim is not None:
            await asyncio.to_thread(claim.remove_everything)
            claim.release()


def _names(hosts: Iterable[NamespaceHost]) -> list[str]:
    return [host.namespace for host in hosts]


def _require_names(nodes: Iterable[str]) -> None:
    for name in nodes:
        if name == COORDINATOR:
            raise NetsimError("a node is named coordinator", "give it another name")
        if not _NAME.fullmatch(name):
            fix = "use letters, digits, dots, dashes and underscores, at most 64"
            raise NetsimError(f"a node cannot be named {name!r}", fix)


def require_namespaces(what: str) -> None:
    """Reject a machine on which no namespace can be made, before anything is made."""
    instead = "or use the proxy, which needs nothing"
    if os.geteuid() != 0:
        raise NetsimError(f"{what} needs root for network namespaces", f"use sudo, {instead}")
    if shutil.which("ip") is None:
        fix = f"install iproute2 (apt-get install iproute2), {instead}"
        raise NetsimError("the program ip was not found", fix)


class SlotRecord(msgspec.Struct, frozen=True):
    """What a run wrote down before it made anything."""

    owner_pid: int
    """For people; the lock decides."""
    namespaces: tuple[str, ...]


class SlotClaim:
    """A locked slot of this machine; its number is part of every namespace's name."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.slot = int(path.stem)
        self.descriptor = descriptor
        self._path = path

    @staticmethod
    def inherit(descriptor: int) -> "SlotClaim":
        """Take over what the parent locked, from the open file alone."""
        return SlotClaim(Path(f"/proc/self/fd/{descriptor}").readlink(), descriptor)

    def make(self, names: Sequence[str]) -> None:
        """Write the names down, then make empty namespaces.

        Raises:
            NetsimError: A namespace of such a name exists; it is not ours and is left alone.
        """
        for name in names:
            if (FOLDER / name).exists():
                what = f"a network namespace {name!r} exists and was not made by netsim"
                raise NetsimError(what, f"remove it: ip netns delete {name}")
        text = msgspec.json.encode(SlotRecord(os.getpid(), tuple(names)))
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, text, 0)
        create(names)

    def remove_everything(self) -> list[str]:
        """Kill what runs in the namespaces of the record, remove them and empty the record.

        Returns:
            The namespaces that were there.
        """
        record_bytes = os.pread(self.descriptor, 1 << 20, 0)
        if not record_bytes:
            return []
        removed_names = destroy(msgspec.json.decode(record_bytes, type=SlotRecord).namespaces)
        os.ftruncate(self.descriptor, 0)
        return removed_names

    def release(self) -> None:
        """Give the slot back. Call after ``remove_everything``."""
        self._path.unlink(missing_ok=True)
        os.close(self.descriptor)


def claim_slot() -> SlotClaim:
    """Lock the first free slot and remove what an earlier run left under it."""
    try:
        RECORDS.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise NetsimError(f"{RECORDS} cannot be made: {error}", "make /run writable") from error
    for slot in range(_SLOTS):
        claim = _lock(RECORDS / f"{slot}.json")
        if claim is not None:
            claim.remove_everything()
            return claim
    what = f"all {_SLOTS} slots in {RECORDS} are taken"
    raise NetsimError(what, "end other runs of netsim first")


def remove_leftovers() -> list[str]:
    """Remove the namespaces of runs that were killed together with their helper process.

    Returns:
        The namespaces that were found and removed.
    """
    removed_names: list[str] = []
    for path in sorted(RECORDS.glob("*.json")):
        if (claim := _lock(path)) is not None:
            removed_names.extend(claim.remove_everything())
            claim.release()
    return removed_names


def _lock(path: Path) -> SlotClaim | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have unlinked the file between our opening and locking it.
        if os.fstat(descriptor).st_ino == path.stat().st_ino:
            return SlotClaim(path, descriptor)
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def create(names: Sequence[str]) -> None:
    """Make empty namespaces."""
    run_batch(["ip"], [f"netns add {name}" for name in names])


def destroy(names: Sequence[str]) -> list[str]:
    """Kill what runs in the namespaces and remove them; those that are gone already are no error.

    Returns:
        The namespaces that were there.
    """
    present = [name for name in names if (FOLDER / name).exists()]
    # While they are open, their inode numbers are not reused.
    descriptors = [os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC) for name in present]
    try:
        numbers = {os.fstat(descriptor).st_ino for descriptor in descriptors}
        _kill_inside(numbers)
        for name in present:
            # Not in one batch: the helper process and its owner may both be removing them.
            if (FOLDER / name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        # A command that was entering when we looked is inside by now.
        _kill_inside(numbers)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return present


def _kill_inside(numbers: set[int]) -> None:
    """Kill all processes of these namespaces, also those that they start meanwhile."""
    for _ in range(_KILLS):
        inside = _processes(numbers)
        if not inside:
            return
        for pid in inside:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_WAIT_S)


def _processes(numbers: set[int]) -> list[int]:
    """Return the processes whose network namespace is one of these, without zombies."""
    process_ids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                if (entry / "ns/net").stat().st_ino in numbers:
                    process_ids.append(int(entry.name))
    return process_ids


@contextmanager
def inside_namespace(name: str) -> Iterator[None]:
    """Work inside a namespace for the block. This moves the calling thread only."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    away = os.open(FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _set_namespace(away)
        try:
            yield
        finally:
            _set_namespace(home)
    finally:
        os.close(home)
        os.close(away)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def write_settings() -> None:
    """Set up the namespace that the caller has entered, as far as its kernel has such settings."""
    for name, value in SETTINGS.items():
        setting = Path("/proc/sys", name)
        if setting.exists():
            setting.write_text(value, "ascii")


def run_batch(program: Sequence[str], lines: Sequence[str]) -> None:
    """Run lines of ``ip``, ``bridge`` or ``tc`` in one process.

    Raises:
        NetsimError: One of them failed; those before it stay done.
    """
    if not lines:
        return
    outcome = subprocess.run(
        [*program, "-batch", "-"],
        input="\n".join(lines).encode() + b"\n",
        capture_output=True,
        check=False,
    )
    if outcome.returncode:
        first, _, _ = outcome.stderr.decode(errors="replace").partition("\n")
        output = first.removeprefix("Error: ")
        raise NetsimError(
            f"{output} (from {program[0]}, {lines[0]!r} or a line after it)",
            "run as root on a kernel with network namespaces, or use the proxy",
        )
