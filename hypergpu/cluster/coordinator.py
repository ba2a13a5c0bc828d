"""A coordinator as a child process: its command line, its ready line, its operator."""

import subprocess
import threading
from pathlib import Path

import msgspec

from hypergpu.client import ConnectionTarget, Coordinator
from hypergpu.cluster.processes import exit_status, kill_group, program
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.extension import PaymentSummary
from hypergpu.terminal.output import note
from hypergpu.wire.token import Role, parse_token

CALL_TIMEOUT_S = 60.0


class ReadyLine(msgspec.Struct, frozen=True):
    """The line a coordinator prints once it serves."""

    address: str
    """Where this machine reaches it."""
    operator_token_file: str
    chain: PaymentSummary | None = None
    """None: no chain is configured."""


class RefusedLine(msgspec.Struct, frozen=True):
    """The line a coordinator prints instead when it will not serve."""

    refused: str
    """The reason's name."""
    detail: str
    fix: str


class StartRefusedError(HyperGPUError):
    """The coordinator said itself why it will not serve: its log adds nothing."""


class SettlingBy(msgspec.Struct, frozen=True):
    """How the payments package settles jobs; empty settings are its own."""

    chain: str = ""
    metering: str = ""
    retries_halted: bool = False
    """Whether halted transactions are tried again at this start."""

    def environment(self) -> dict[str, str]:
        """These settings as the coordinator's environment."""
        values = {
            "CHAIN": self.chain,
            "METERING": self.metering,
            "RETRY_PAYMENTS": "1" if self.retries_halted else "",
        }
        return {f"HYPERGPU_COORDINATOR_{name}": value for name, value in values.items() if value}


class Listen(msgspec.Struct, frozen=True):
    """Where a coordinator is to listen, and what it keeps."""

    data_dir: Path
    listen: str = ""
    port: int | None = None
    node_port: int | None = None
    advertise: tuple[str, ...] = ()
    is_plaintext: bool = False


def coordinator_command(at: Listen) -> list[str]:
    """How the coordinator is started."""
    arguments = ["--data-dir", str(at.data_dir)]
    if at.listen:
        arguments += ["--listen", at.listen]
    if at.port is not None:
        arguments += ["--port", str(at.port)]
    if at.node_port is not None:
        arguments += ["--node-port", str(at.node_port)]
    for address in at.advertise:
        arguments += ["--advertise", address]
    if at.is_plaintext:
        arguments.append("--plaintext")
    return program("coordinator", *arguments)


def wait_until_ready(child: subprocess.Popen[str], within_s: float | None = None) -> ReadyLine:
    """Read the child's ready line.

    Args:
        child: The coordinator, whose stdout is read.
        within_s: It is killed when it says nothing for so long; None: people watch it themselves.

    Raises:
        StartRefusedError: it said why not.
        HyperGPUError: CHILD_ENDED, it ended, or was killed, before it was ready.
    """
    if within_s is None:
        return _read_ready(child)
    killer = threading.Timer(within_s, kill_group, [child])
    killer.daemon = True
    killer.start()
    try:
        return _read_ready(child)
    finally:
        killer.cancel()


def _read_ready(child: subprocess.Popen[str]) -> ReadyLine:
    lines = child.stdout or ()
    for line in lines:
        try:
            said = msgspec.json.decode(line)
            if isinstance(said, dict) and said.get("refused") in Reason.__members__:
                why = msgspec.convert(said, RefusedLine)
                raise StartRefusedError(Reason[why.refused], why.detail, fix=why.fix)
            return msgspec.convert(said, ReadyLine)
        except (msgspec.DecodeError, msgspec.ValidationError):
            note(line.rstrip())
    status = exit_status(child)
    raise HyperGPUError(Reason.CHILD_ENDED, f"the coordinator ended with status {status}")


def operator(ready: ReadyLine) -> Coordinator:
    """A connection with the operator's token of this machine's coordinator."""
    token = parse_token(Path(ready.operator_token_file).read_text("utf-8"))
    return Coordinator(ConnectionTarget(ready.address, token, CALL_TIMEOUT_S))


def join_token(ready: ReadyLine, *, ttl_s: int, uses: int, label: str) -> str:
    """A fresh token for nodes."""
    with operator(ready) as coordinator:
        return coordinator.create_token(Role.NODE, ttl_s=ttl_s, uses=uses, label=label).token
