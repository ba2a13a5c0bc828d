"""The chain of play money beside a coordinator: an Anvil that is kept running, and where it was.

It goes with its coordinator however that ends. Ended by anything else it is started again on its
port, with its state of the last block or so; what that lacks is sent again as after a
reorganisation.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from hypergpu.chain.local.anvil import Anvil, AnvilOptions, is_port_freed
from hypergpu.chain.local.state_file import StateKeeper
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import HttpRpc
from hypergpu.chain.rpc.errors import RpcError
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.errors import HyperGPUError
from hypergpu.files import write_durably
from hypergpu.wire.ports import free_ports

log = structlog.get_logger()

STATE_FILE = "anvil.json"
LOG_FILE = "anvil.log"
PORT_FILE = "anvil.port"
_LOOK_EACH_S = 0.2
_FREE_WITHIN_S = 20.0
"""An Anvil whose coordinator was killed is ending meanwhile."""
_PORT_MOST = 65_535
_REST_MOST_S = 30.0
_STEADY_AFTER_S = 60.0
"""Having run for so long, it is started again at once; before, each time after a longer rest."""
Provide = Callable[[EvmChain], None]
"""See that a chain that has begun gives its coordinator what it needs."""


class LocalChain:
    """An Anvil in a folder of its own, with its state, its log and its port."""

    def __init__(self, folder: Path, chain_id: int, *, port: int, provide: Provide) -> None:
        """Choose the port, which may take some seconds where it is taken; start nothing yet.

        Args:
            folder: There already.
            chain_id: Of the chain.
            port: 0: the one it had last, or a free one.
            provide: Called after each start again: the kept state may be of before what was given.
        """
        self.complaint = ""
        """What is wrong with it now; empty while it runs."""
        self._file = folder / STATE_FILE
        self.note = ""
        """What whoever started it is to know."""
        chosen = port or self._usual_port(folder / PORT_FILE)
        write_durably(folder / PORT_FILE, f"{chosen}\n".encode())
        options = AnvilOptions(port=chosen, begins_with=self._file, chain_id=chain_id)
        self._anvil = Anvil(options, log=folder / LOG_FILE)
        self._keeper = StateKeeper(self.url, self._file)
        self._provide = provide
        self._starts = 0
        """In a row, after ends of its own."""
        self._started_at_s = 0.0
        self._start_at_s = 0.0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="local chain", daemon=True)

    @property
    def url(self) -> str:
        """Of its RPC, at every start the same."""
        return self._anvil.url

    def _usual_port(self, file: Path) -> int:
        last = _last_port(file)
        if last and is_port_freed(last, _FREE_WITHIN_S):
            return last
        (chosen,) = free_ports(1)
        if last:
            self.note = f"the chain's port {last} is taken by another program; it has {chosen}"
            log.warning("the local chain has another port", last=last, now=chosen)
        return chosen

    def start(self) -> None:
        """Start it and keep it running.

        Raises:
            HyperGPUError: MACHINE_UNFIT, Anvil is not installed or does not start.
        """
        self._anvil.start()
        self._started_at_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """End it with its state kept. Blocks."""
        self._is_stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._kept(self._keeper.keep)
        self._keeper.close()
        self._anvil.stop()

    def _watch(self) -> None:
        while not self._is_stopping.wait(_LOOK_EACH_S):
            if not self._anvil.is_running:
                self._start_again()
            elif not self.complaint or self._is_provided():
                self._kept(self._keeper.look)

    def _start_again(self) -> None:
        now_s = time.monotonic()
        if not self.complaint:
            self._note_end(now_s)
        if now_s < self._start_at_s:
            return
        # Ends what is left of it, and takes its port.
        self._anvil.stop()
        self._starts += 1
        self._start_at_s = now_s + _rest_s(self._starts)
        try:
            self._anvil.start()
        except (HyperGPUError, OSError) as broken:
            why = broken.detail if isinstance(broken, HyperGPUError) else str(broken)
            self.complaint = f"the local chain ended and does not start again: {why}"
            log.warning("the local chain does not start again", reason=why)
            return
        self._started_at_s = time.monotonic()
        log.warning("the local chain was started again", url=self.url, starts=self._starts)

    def _note_end(self, now_s: float) -> None:
        if now_s >= self._started_at_s + _STEADY_AFTER_S:
            self._starts, self._start_at_s = 0, 0.0
        self.complaint = "the local chain ended by itself; it is started again with its kept state"
        log.error("the local chain ended by itself", url=self.url)

    def _is_provided(self) -> bool:
        """Whether a chain that was started again has what it needs; nothing is kept before."""
        rpc = HttpRpc(HttpTransport(self.url))
        try:
            self._provide(EvmChain(rpc))
        except RpcError as broken:
            self.complaint = f"the local chain was started again and does not answer: {broken}"
            return False
        finally:
            rpc.close()
        self.complaint = ""
        return True

    def _kept(self, keep: Callable[[], None]) -> None:
        try:
            keep()
        except RpcError as broken:
            if self._anvil.is_running:
                log.warning("the local chain's state is not kept", reason=str(broken))
        except OSError as broken:
            log.warning("the local chain's state is not kept", reason=str(broken))


def _rest_s(starts: int) -> float:
    """Between one start and the next, of a chain that keeps ending."""
    return min(_REST_MOST_S, 2.0 ** (starts - 1))


def _last_port(file: Path) -> int:
    """The port of last time; 0: there is none."""
    with suppress(OSError, ValueError):
        last = int(file.read_text("ascii"))
        return last if 0 < last <= _PORT_MOST else 0
    return 0
