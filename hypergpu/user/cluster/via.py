"""Ports of a rented machine that lead to this machine's coordinator, by an ssh that is kept alive.

It speaks for no node: TLS goes through from end to end.
"""

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from hypergpu.clock import unix_s
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.leash import leash_command
from hypergpu.privacy import public_environment, variables_of
from hypergpu.user.cluster.processes import kill_group
from hypergpu.user.cluster.ssh import (
    LOOPBACK_ONLY_FIX,
    PROGRAM,
    SshDestination,
    failure_of,
    forward_command,
    hostname_of,
    is_success,
)

STATE_FILE = "via.json"
STANDS_WITHIN_S = 45.0
DIAL_TIMEOUT_S = 10.0
_RETRY_FIRST_S, _RETRY_MOST_S = 1.0, 30.0
_STEADY_S = 60.0
"""A connection that stood for so long was fine: the next failure starts with the shortest wait."""
_LINES_KEPT = 200


class ViaState(msgspec.Struct, frozen=True):
    """What `hypergpu doctor` reads of a coordinator's way through another machine."""

    there: str
    host: str
    ports: tuple[int, ...]
    process_id: int
    """The process that keeps it."""
    is_up: bool
    detail: str = ""
    fix: str = ""
    since_unix_s: int = 0


def read_state(data_dir: Path) -> ViaState | None:
    """The state that a living `up` keeps in the coordinator's folder; None: there is none."""
    try:
        state = msgspec.json.decode((data_dir / STATE_FILE).read_bytes(), type=ViaState)
        os.kill(state.process_id, 0)
    except (OSError, msgspec.MsgspecError):
        return None
    return state


def ssh_hostname(destination: SshDestination) -> str:
    """The host that the user's own ssh dials for a destination: nodes dial the same.

    Raises:
        HyperGPUError: MACHINE_UNFIT, there is no ssh; FORWARDING_FAILED, its settings are wrong.
    """
    command = [PROGRAM, "-G", *destination.words]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        fix = "install OpenSSH's client: apt-get install openssh-client"
        raise HyperGPUError(Reason.MACHINE_UNFIT, "--via needs ssh", fix=fix) from None
    if process.returncode:
        raise failure_of(process.stderr.splitlines(), destination)
    return hostname_of(process.stdout, destination)


class ForwardedPorts(NamedTuple):
    """What leads where."""

    destination: SshDestination
    host: str
    """What nodes dial."""
    target_host: str
    """Where the coordinator listens on this machine."""
    ports: tuple[int, ...]


class Via:
    """The ssh and the thread that starts it again, from the block's beginning to its end."""

    def __init__(self, way: ForwardedPorts, data_dir: Path, tell: Callable[[str], None]) -> None:
        """Nothing is started yet.

        Args:
            way: What leads where.
            data_dir: Gets the state.
            tell: Gets a sentence each time that the state changes after the start.
        """
        self._way = way
        self._state_path = data_dir / STATE_FILE
        self._tell = tell
        self._has_outcome = threading.Event()
        self._is_ending = threading.Event()
        self._first_failure: HyperGPUError | None = None
        self._child: subprocess.Popen[str] | None = None
        # Its thread holds the leash of every ssh: it lives as long as they may.
        self._keeper = threading.Thread(target=self._keep, name="via", daemon=True)

    def __enter__(self) -> Self:
        """Start it, and wait until the ports answer from outside.

        Raises:
            HyperGPUError: FORWARDING_FAILED, with the fix.
        """
        self._keeper.start()
        try:
            self._wait_for_first()
            for port in self._way.ports:
                self._check_from_outside(port)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that lead here."""
        return self._way.ports

    def end(self) -> None:
        """End it at once."""
        self._is_ending.set()
        if (child := self._child) is not None and child.poll() is None:
            kill_group(child)
        self._keeper.join()
        self._state_path.unlink(missing_ok=True)

    def _wait_for_first(self) -> None:
        if not self._has_outcome.wait(STANDS_WITHIN_S):
            detail = f"ssh {self._way.destination} opened no port within {STANDS_WITHIN_S:.0f} s"
            raise HyperGPUError(Reason.FORWARDING_FAILED, detail)
        if self._first_failure is not None:
            raise self._first_failure

    def _check_from_outside(self, port: int) -> None:
        host, there = self._way.host, self._way.destination
        try:
            socket.create_connection((host, port), DIAL_TIMEOUT_S).close()
        except ConnectionRefusedError:
            detail = (
                f"{there} opens port {port} on its loopback only, since GatewayPorts is no there:"
                f" {host} refuses whoever dials it"
            )
            raise HyperGPUError(Reason.FORWARDING_FAILED, detail, fix=LOOPBACK_ONLY_FIX) from None
        except OSError as error:
            detail = f"{there} opened port {port}, and {host} does not answer there: {error}"
            fix = f"open TCP port {port} in its firewall, at its provider too"
            raise HyperGPUError(Reason.FORWARDING_FAILED, detail, fix=fix) from error

    def _keep(self) -> None:
        wait_s = _RETRY_FIRST_S
        while not self._is_ending.is_set():
            began_s = time.monotonic()
            failure = self._try_once()
            is_first = not self._has_outcome.is_set()
            if self._is_ending.is_set() or is_first:
                self._first_failure = failure
                self._has_outcome.set()
                return
            if time.monotonic() - began_s >= _STEADY_S:
                wait_s = _RETRY_FIRST_S
            self._write_state(failure)
            self._tell(f"via {self._way.destination}: {failure.message}. Again in {wait_s:.0f} s.")
            self._is_ending.wait(wait_s)
            wait_s = min(2 * wait_s, _RETRY_MOST_S)

    def _try_once(self) -> HyperGPUError:
        """As `_run_once`; where ssh cannot be started, that is why."""
        try:
            return self._run_once()
        except OSError as error:
            return HyperGPUError(Reason.FORWARDING_FAILED, f"ssh cannot be run: {error}")

    def _run_once(self) -> HyperGPUError:
        """Run ssh to its end; returns why it ended."""
        way = self._way
        self._child = child = _start(forward_command(way.destination, way.target_host, way.ports))
        if self._is_ending.is_set():
            kill_group(child)
        lines: list[str] = []
        open_ports = 0
        assert child.stderr is not None  # noqa: S101 - a pipe
        with child.stderr as stderr:
            for line in stderr:
                open_ports += is_success(line)
                if is_success(line) and open_ports == len(way.ports):
                    self._note_standing()
                lines = [*lines[1 - _LINES_KEPT :], line]
        child.wait()
        return failure_of(lines, way.destination)

    def _note_standing(self) -> None:
        self._write_state(None)
        if self._has_outcome.is_set():
            self._tell(f"via {self._way.destination}: the ports are open again")
        self._has_outcome.set()

    def _write_state(self, failure: HyperGPUError | None) -> None:
        way = self._way
        state = ViaState(
            there=str(way.destination),
            host=way.host,
            ports=way.ports,
            process_id=os.getpid(),
            is_up=failure is None,
            detail=failure.detail if failure else "",
            fix=failure.fix if failure else "",
            since_unix_s=unix_s(),
        )
        # A full disk must not end what nodes come through.
        with contextlib.suppress(OSError):
            write_durably(self._state_path, msgspec.json.encode(state))


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        leash_command(list(command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        # Where the user's agent is.
        env={**public_environment(), **variables_of("SSH_")},
    )
