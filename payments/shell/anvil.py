"""Anvil, a local chain of play money: a process that ends with ours, its state kept in a file.

Anvil's own state file is written in place, so that a kill leaves half of one. Here the state is
asked for and takes the file's place at once; what a kill loses is sent again, as after a
reorganisation. The platform's program is called directly: npm's `anvil` is a Node script around it.
"""

import asyncio
import gzip
import os
import platform
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import structlog

from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.leash import leash_command
from hypergpu.privacy import public_environment
from hypergpu.wire.free_ports import free_ports
from payments.shell.chains import ChainError, ChainUnreachableError
from payments.shell.ethereum import Ethereum

log = structlog.get_logger()

VARIABLE = "HYPERGPU_ANVIL"
"""Names the program where it is neither on PATH nor in ``node_modules``."""
CHAIN_ID = 31337
STATE_FILE = "anvil.json"
_LOOPBACK = "127.0.0.1"
_READY_WITHIN_S = 60.0
_STOP_WITHIN_S = 60.0
_POLL_S = 0.02
_LOOK_EACH_S = 0.2
_REST_TIMES = 2
"""Keeping a state takes 20 us for each block: at most a third of a core goes into it."""
_LOG_SHOWN_BYTES = 2_000


class AnvilOptions(msgspec.Struct, frozen=True):
    """Settings of a local chain."""

    port: int = 0
    """0 takes a free one."""
    block_time_s: int = 1
    """Time between blocks, full or empty; 0: a block only when `evm_mine` asks for one."""
    state_file: Path | None = None
    """State to begin with, where the file is there. `KeptAnvil` writes it."""
    chain_id: int = CHAIN_ID


class Anvil:
    """An Anvil process. One that has ended may be started again."""

    def __init__(self, options: AnvilOptions, *, log_file: Path) -> None:
        """Start nothing yet.

        Args:
            options: A port of 0 is chosen now and stays.
            log_file: Anvil's output is appended to it.
        """
        port = options.port or free_ports(1)[0]
        self.options = msgspec.structs.replace(options, port=port)
        self.url = f"http://{_LOOPBACK}:{port}"
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and return once it listens, usually after a tenth of a second. Blocks.

        Raises:
            HyperGPUError: MACHINE_UNFIT, Anvil is not installed or does not start.
        """
        command = leash_command([str(anvil_program()), *_arguments(self.options)])
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=public_environment(),
            )
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while self.is_running and time.monotonic() < deadline_s:
            if _is_listening(self.options.port):
                return
            time.sleep(_POLL_S)
        self.kill()
        raise HyperGPUError(
            Reason.MACHINE_UNFIT,
            f"Anvil did not start on port {self.options.port}; its log {self._log_file} ends: "
            f"{self._log_file.read_bytes()[-_LOG_SHOWN_BYTES:].decode(errors='replace').strip()}",
            fix="free the port or give another; where the state file is damaged, move it away: the"
            " local chain then starts anew",
        )

    def stop(self) -> None:
        """End it; kill it where that takes too long. Blocks."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_WITHIN_S)
        self.kill()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


class KeptAnvil:
    """An Anvil that runs as long as its coordinator and begins where it was."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Choose the port: the given one or a free one."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = folder / STATE_FILE
        options = AnvilOptions(port=port, state_file=self._file)
        self._anvil = Anvil(options, log_file=folder / "anvil.log")
        self.url = self._anvil.url
        self._chain = Ethereum(self.url)
        self._kept = b""

    def start(self) -> None:
        """Start it, from the main thread, usually within a tenth of a second. Blocks.

        Raises:
            HyperGPUError: MACHINE_UNFIT, Anvil is not installed or does not start.
        """
        self._anvil.start()

    async def run(self) -> None:
        """Keep its state after each block, and start it again when it ends by itself."""
        while True:
            began_s = time.monotonic()
            if not self._anvil.is_running:
                log.error("the local chain ended by itself; it is started again", url=self.url)
                self.start()
            await self._keep()
            took_s = time.monotonic() - began_s
            await asyncio.sleep(max(_LOOK_EACH_S, _REST_TIMES * took_s))

    async def stop(self) -> None:
        """End it with its state kept."""
        await self._keep()
        await self._chain.close()
        await asyncio.to_thread(self._anvil.stop)

    async def _keep(self) -> None:
        """Keep the state if there is a new block."""
        try:
            head = await self._chain.head()
            if head.hash != self._kept and await keep_state(self._chain, self._file):
                self._kept = head.hash
        except (ChainError, OSError) as error:
            log.warning("the local chain's state is not kept", reason=str(error))


async def keep_state(chain: Ethereum, file: Path) -> bool:
    """Write an Anvil's state into a file that `AnvilOptions.state_file` takes.

    Returns:
        False where a block came meanwhile: the state might have its nonces without its
        transactions, and nothing was written.
    """
    head = await chain.head()
    state = await chain.ask("anvil_dumpState")
    if (await chain.head()).hash != head.hash:
        return False
    await asyncio.to_thread(_write_state, file, state)
    return True


@contextmanager
def running_anvil(options: AnvilOptions, *, log_file: Path) -> Iterator[Anvil]:
    """An Anvil for as long as the block lasts."""
    anvil = Anvil(options, log_file=log_file)
    anvil.start()
    try:
        yield anvil
    finally:
        anvil.stop()


def anvil_program() -> Path:
    """Anvil's program: named by the environment, in a ``node_modules`` above here, or on PATH.

    Raises:
        HyperGPUError: MACHINE_UNFIT, it is nowhere.
    """
    if stated_path := os.environ.get(VARIABLE):
        return Path(stated_path)
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    package = f"@foundry-rs/anvil-{platform.system().lower()}-{machine}"
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        program = folder / "node_modules" / package / "bin" / "anvil"
        if program.is_file():
            return program
    if found_path := shutil.which("anvil"):
        return Path(found_path)
    raise HyperGPUError(
        Reason.MACHINE_UNFIT,
        "a local chain needs Anvil, which is not installed",
        fix=f"in a clone: npm install; elsewhere name its program: {VARIABLE}=/path/to/anvil",
    )


def _arguments(options: AnvilOptions) -> list[str]:
    arguments = [
        *("--host", _LOOPBACK, "--port", str(options.port)),
        *("--chain-id", str(options.chain_id), "--gas-limit", "30000000"),
        *("--accounts", "1", "--no-request-size-limit", "--quiet", "--enable-tx-gas-limit"),
    ]
    every = options.block_time_s
    arguments += ["--block-time", str(every)] if every else ["--no-mining"]
    if options.state_file is not None and options.state_file.exists():
        arguments += ["--load-state", str(options.state_file)]
    return arguments


def _write_state(file: Path, state: object) -> None:
    try:
        content = gzip.decompress(bytes.fromhex(str(state)[2:]))
    except (EOFError, OSError, ValueError, zlib.error) as odd:
        raise ChainUnreachableError(f"Anvil gave no state: {odd}") from None
    write_durably(file, content)


def _is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection((_LOOPBACK, port), timeout=1.0):
        return True
    return False
