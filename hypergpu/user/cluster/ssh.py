"""OpenSSH's client in words of ours: how ports of another machine are made to lead here by
``ssh -R``, and what its lines say. Keys, known hosts and jumps are those of the user's own ssh.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason

PROGRAM = "ssh"
_DESTINATION = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9_.-]*)"
    r"(?::(?P<port>[0-9]{1,5}))?",
    re.ASCII,
)
_PORT_MAX = 65535
ALIVE_INTERVAL_S, ALIVE_COUNT = 10, 3
"""A connection that answers nothing for so many intervals is given up."""
CONNECT_TIMEOUT_S = 15
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": CONNECT_TIMEOUT_S,
    # A shared connection would outlive this process, or end with another one.
    "ControlMaster": "no",
    "ControlPath": "none",
    "ExitOnForwardFailure": "yes",
    "PermitLocalCommand": "no",
    "ServerAliveCountMax": ALIVE_COUNT,
    "ServerAliveInterval": ALIVE_INTERVAL_S,
    "StrictHostKeyChecking": "yes",
}
_SUCCESS = re.compile(r"debug1: remote forward success for: listen ")
_NOISE = re.compile(r"debug[123]: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: |@+$")


class SshDestination(NamedTuple):
    """A machine that is rented, as ``user@host[:port]``."""

    user: str
    """Empty: as the user's own settings of ssh say."""
    host: str
    """Without brackets; may be a name that only those settings know."""
    port: int | None = None

    @property
    def words(self) -> list[str]:
        """The arguments of ssh that name it."""
        port = [] if self.port is None else ["-p", str(self.port)]
        return [*port, "--", f"{self.user}@{self.host}" if self.user else self.host]

    def __str__(self) -> str:
        """As a person would type it behind ``ssh``."""
        return " ".join(word for word in self.words if word != "--")


def parse_destination(text: str) -> SshDestination:
    """Read ``user@host[:port]``; an IPv6 address stands in brackets.

    Raises:
        HyperGPUError: ARGUMENT_INVALID.
    """
    match = _DESTINATION.fullmatch(text)
    port = int(match["port"]) if match and match["port"] else None
    if match is None or (port is not None and not 0 < port <= _PORT_MAX):
        fix = "write user@host or user@host:port, as in --via root@203.0.113.7"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"--via {text!r} names no machine", fix=fix)
    return SshDestination(match["user"] or "", match["host"].strip("[]"), port)


def forward_command(
    destination: SshDestination, target_host: str, ports: Iterable[int]
) -> list[str]:
    """The command that keeps ports open on another machine, under the numbers they have here.

    Args:
        destination: That machine, whose every address is asked for.
        target_host: What is dialled here.
        ports: The ports.
    """
    target = f"[{target_host}]" if ":" in target_host else target_host
    options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
    forwards = [word for port in ports for word in ("-R", f"*:{port}:{target}:{port}")]
    # -v: it tells when a forwarding stands; -a, -x: neither agent nor display for that machine.
    return [PROGRAM, "-v", "-N", "-T", "-a", "-x", *options, *forwards, *destination.words]


def is_success(line: str) -> bool:
    """Whether the line says that one forwarding stands."""
    return bool(_SUCCESS.match(line))


def hostname_of(settings: str, destination: SshDestination) -> str:
    """The host that ssh dials, from what ``ssh -G`` printed."""
    match = re.search(r"^hostname (\S+)$", settings, re.MULTILINE)
    return match[1] if match else destination.host


def failure_of(lines: Sequence[str], destination: SshDestination) -> HyperGPUError:
    """The error for an ssh that ended, from what it said on stderr."""
    messages = [line.strip() for line in lines if line.strip() and not _NOISE.match(line)]
    text = "\n".join(messages)
    for failure in _FAILURES:
        if match := re.search(failure.pattern, text):
            names = {"there": str(destination), "said": match[0], "host": _known_name(destination)}
            detail, fix = failure.detail.format(**names), failure.fix.format(**names)
            return HyperGPUError(Reason.FORWARDING_FAILED, detail, fix=fix)
    last = messages[-1] if messages else "ssh ended without a word"
    fix = f"see what it says: ssh -v {destination}"
    return HyperGPUError(Reason.FORWARDING_FAILED, f"ssh {destination}: {last}", fix=fix)


def _known_name(destination: SshDestination) -> str:
    """The machine's name in a file of known hosts."""
    if destination.port in (None, 22):
        return destination.host
    return f"[{destination.host}]:{destination.port}"


class _KnownFailure(NamedTuple):
    """What ssh says, and what that means to people."""

    pattern: str
    detail: str
    fix: str


_FAILURES = (
    _KnownFailure(
        pattern="REMOTE HOST IDENTIFICATION HAS CHANGED",
        detail="{there} shows another host key than the one that is known here: it was set up anew,"
        " or somebody stands between",
        fix="compare its fingerprint with the one that its provider shows; if they agree:"
        " ssh-keygen -R '{host}', then once by hand: ssh {there}",
    ),
    _KnownFailure(
        pattern="Host key verification failed|host key is known for",
        detail="the host key of {there} is not known here",
        fix="connect once by hand, compare the fingerprint with the one that its provider shows,"
        " and accept it: ssh {there}",
    ),
    _KnownFailure(
        pattern=r"Permission denied \([^)]*\)",
        detail="{there} takes none of your keys: {said}",
        fix="ssh-copy-id {there}; a key with a passphrase has to be in ssh-agent: ssh-add",
    ),
    _KnownFailure(
        pattern=r"remote port forwarding failed for listen port \d+",
        detail="{there} does not open the port: {said}. It is taken there, maybe by the connection"
        " before this one, or forwarding is forbidden",
        fix="see who has it: ss -ltnp; in /etc/ssh/sshd_config there AllowTcpForwarding has to be"
        " yes or remote, and ClientAliveInterval 15 ends dead connections",
    ),
    _KnownFailure(
        pattern=r"(?:Could not resolve hostname|connect to host) .*",
        detail="{there} is not reached: {said}",
        fix="correct the name and the port, or start the machine",
    ),
)
LOOPBACK_ONLY_FIX = (
    "in /etc/ssh/sshd_config there set GatewayPorts clientspecified, then: systemctl reload ssh"
)
