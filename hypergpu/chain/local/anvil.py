"""A local chain: Anvil as a process that ends with ours, its state kept in a file.

The platform's program is called directly: npm's `anvil` is a Node script around it that starts more
slowly and does not pass signals on.
"""

import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.errors import RpcError
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.ports import free_ports

VARIABLE = "HYPERGPU_ANVIL"
"""Names the program where it lies elsewhere than in ``node_modules``."""
CHAIN_ID = 31337
_LOOPBACK = "127.0.0.1"
_READY_WITHIN_S = 60.0
_POLL_S = 0.02
_STOP_WITHIN_S = 60.0
_LOG_SHOWN_BYTES = 2_000

# Ends Anvil when the pipe to this shell is closed, which the system does for us however we end.
# It is waited for in the foreground, so that its exit status is the shell's.
_GUARD = """
exec 3<&0
"$@" </dev/null & anvil=$!
{ read -r _; kill -TERM $anvil; } <&3 2>/dev/null & reader=$!
exec 3<&-
trap '' TERM INT
wait $anvil; status=$?
kill $reader 2>/dev/null
exit $status
"""


class AnvilOptions(msgspec.Struct, frozen=True):
    """How a local chain runs."""

    port: int = 0
    """0 takes a free one."""
    block_time_s: int = 1
    """A block each so many seconds, full or empty; 0: only when `evm_mine` asks for one. One for
    each transaction is not offered: it grows slower and slower under load."""
    state_file: Path | None = None
    """Where height, balances and nonces survive a stop; None forgets them. It is written once a
    second and at the end: a kill loses at most the last second, as a reorganisation would, and now
    and then the whole file, of which half was written."""
    begins_with: Path | None = None
    """A state that it begins with where the file is there, and never writes: `StateKeeper` does."""
    block_gas_max: int = 30_000_000
    chain_id: int = CHAIN_ID
    has_transaction_gas_limit: bool = True
    """Whether a transaction may take 2^24 gas at most, as since EIP-7825 on live chains."""


class Anvil:
    """A running Anvil. One that was killed may be started again."""

    def __init__(self, options: AnvilOptions, *, log: Path) -> None:
        """Start nothing yet.

        Args:
            options: How it runs; a port of 0 is chosen now and stays.
            log: Where its output is appended.
        """
        port = options.port or free_ports(1)[0]
        self.options = msgspec.structs.replace(options, port=port)
        self.url = f"http://{_LOOPBACK}:{port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and return once it answers, usually after a tenth of a second.

        Raises:
            HyperGPUError: MACHINE_UNFIT, it is not installed or does not start.
        """
        program = anvil_program()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "anvil", str(program), *_arguments(self.options)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Let it write its state and end; kill it where it takes too long."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            _kill(process)

    def kill(self) -> None:
        """End it at once, as a crash would: what its state file does not hold is lost."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)

    def _wait_until_ready(self) -> None:
        rpc = HttpRpc(HttpTransport(self.url, timeout_s=2.0))
        deadline_s = time.monotonic() + _READY_WITHIN_S
        try:
            while self.is_running and time.monotonic() < deadline_s:
                with suppress(RpcError):
                    if rpc.call(Call("eth_chainId")) == hex(self.options.chain_id):
                        return
                time.sleep(_POLL_S)
        finally:
            rpc.close()
        raise HyperGPUError(
            Reason.MACHINE_UNFIT,
            f"Anvil did not start on port {self.options.port}; its log {self._log} ends: "
            f"{_tail(self._log)}",
            fix="free the port or give another; where its state file is damaged, move it away: "
            "the local chain then starts anew",
        )


@contextmanager
def running_anvil(options: AnvilOptions, *, log: Path) -> Iterator[Anvil]:
    """An Anvil for as long as the block lasts."""
    anvil = Anvil(options, log=log)
    anvil.start()
    try:
        yield anvil
    finally:
        anvil.stop()


def anvil_program() -> Path:
    """Where Anvil lies: named by the environment, on PATH, or in a ``node_modules`` above here.

    Raises:
        HyperGPUError: MACHINE_UNFIT, nowhere.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    package = f"@foundry-rs/anvil-{platform.system().lower()}-{machine}"
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        program = folder / "node_modules" / package / "bin" / "anvil"
        if program.is_file():
            return program
    if found := shutil.which("anvil"):
        return Path(found)
    raise HyperGPUError(
        Reason.MACHINE_UNFIT,
        "a local chain needs Anvil, which is not installed",
        fix=f"in a clone: npm install; elsewhere name its program: {VARIABLE}=/path/to/anvil",
    )


def _arguments(options: AnvilOptions) -> list[str]:
    return [
        *("--host", _LOOPBACK, "--port", str(options.port)),
        *("--chain-id", str(options.chain_id), "--gas-limit", str(options.block_gas_max)),
        *("--accounts", "1", "--no-request-size-limit", "--quiet"),
        *(["--block-time", str(options.block_time_s)] if options.block_time_s else ["--no-mining"]),
        *(["--enable-tx-gas-limit"] if options.has_transaction_gas_limit else []),
        *(
            ["--state", str(options.state_file), "--state-interval", "1"]
            if options.state_file is not None
            else []
        ),
        *(
            ["--load-state", str(options.begins_with)]
            if options.begins_with is not None and options.begins_with.exists()
            else []
        ),
    ]


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    process.wait()


def is_port_freed(port: int, within_s: float) -> bool:
    """Whether a chain can listen on it now, or could in time. Blocks."""
    deadline_s = time.monotonic() + within_s
    while not (is_free := _is_free(port)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return is_free


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        # As Anvil does: connections of before that are not forgotten yet take no port.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            tried.bind((_LOOPBACK, port))
            return True
    return False


def _tail(path: Path) -> str:
    with suppress(OSError), path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - _LOG_SHOWN_BYTES))
        return log.read().decode(errors="replace").strip() or "(it says nothing)"
    return "(it cannot be read)"
