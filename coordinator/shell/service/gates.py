"""Who may call what: callers are admitted by protocol, identity, revocation, role and rate."""

import asyncio
import ipaddress
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

from coordinator.core.hub.admission import Appointments
from coordinator.shell.nodes.identity.gateways import GATEWAY_KEY, NODE_KEY, gateway_token
from coordinator.shell.nodes.identity.tokens import IssuedTokens
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.rate import NODE_CALLS, GuessLimiter, OpenCounter
from coordinator.shell.service.calls import Caller, Gate
from coordinator.shell.service.versions import reject_other_protocol
from hypergpu.clock import monotonic_ms, unix_s
from hypergpu.crypto import is_node_id
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.protocol import PROTOCOL_KEY
from hypergpu.rates import Rate, RateLimiter
from hypergpu.units import Milliseconds
from hypergpu.wire.credentials import Role, parse_authorization

OPERATORS = frozenset({Role.OPERATOR})
USERS = frozenset({Role.USER, Role.OPERATOR})
_OPERATORS = frozenset({Role.OPERATOR})
_NODE_OWNERS = frozenset({Role.NODE, Role.OPERATOR})
_READERS = frozenset(Role)
"""A node's token reads of the nodes that joined with it and of the jobs they had a part in."""
_ROLES = {
    "JobService.ListJobs": _READERS,
    "JobService.GetJob": _READERS,
    "JobService.WatchJob": _READERS,
    "JobService.GetToken": _READERS,
    "PaymentsService.GetLedger": _READERS,
    "PaymentsService.ListReceipts": _READERS,
    "OperatorService.ListNodes": _READERS,
    "OperatorService.WatchTelemetry": _READERS,
    "OperatorService.DrainNode": _NODE_OWNERS,
    "OperatorService.PauseNode": _NODE_OWNERS,
    "ServingService.LabelNode": _OPERATORS,
    "ServingService.CertifyApi": _OPERATORS,
    "OperatorService.ResumeNode": _NODE_OWNERS,
}
"""Who may call a method where its service's gate does not decide."""
_LINE_BITS = {4: 32, 6: 64}
"""Bits of an address that all machines of one line have in common, by the protocol's version."""
_ADDRESS_DIGITS = 16
_OFFERS = Rate(burst=100, interval_ms=Milliseconds(50))
"""Offers of one node: each may cost a row in the journal."""


_STREAMS_PER_S, _STREAMS_BURST = 500, 1_000
"""Control streams that may open: whoever comes beyond that is told when to."""
_NODE_STREAMS_MAX = 4
"""A new control stream ends the older ones, which may take a moment."""
_TOKEN_CALLS = Rate(burst=2_000, interval_ms=Milliseconds(1))
"""Calls of one token to one service: a data set of many small files takes two calls a file."""
_TOKEN_STREAMS_MAX = 256
"""Open streams of one token at one service: a page holds one for each job that runs."""


class OpenGate:
    """Admits everybody: for the health service."""

    async def admit(self, caller: Caller) -> None:
        return


class DrivingGate:
    """Admits nobody, and ends every stream, once another coordinator may drive."""

    def __init__(self, check_driving: Callable[[], None], gate: Gate) -> None:
        """Ask ``gate`` while ``check_driving`` does not raise."""
        self._check_driving = check_driving
        self._gate = gate

    async def admit(self, caller: Caller) -> None:
        self._check_driving()
        await self._gate.admit(caller)
        recheck = caller.recheck

        def recheck_both() -> None:
            self._check_driving()
            recheck()

        caller.recheck = recheck_both


class JoinGate:
    """Admits whoever speaks our protocol; the join itself judges the token."""

    async def admit(self, caller: Caller) -> None:
        reject_other_caller(caller)


class TokenGate:
    """Admits holders of a token whose role may call the method."""

    def __init__(self, tokens: IssuedTokens, guesses: GuessLimiter, roles: frozenset[Role]) -> None:
        """Judge by `tokens`; ``roles`` may call the methods that `_ROLES` does not name."""
        self._tokens = tokens
        self._guesses = guesses
        self._roles = roles
        self._calls = RateLimiter(_TOKEN_CALLS)
        self._streams = OpenCounter(_TOKEN_STREAMS_MAX, "streams")

    async def admit(self, caller: Caller) -> None:
        reject_other_caller(caller)
        credential = parse_authorization(caller.metadata.get("authorization", ""))
        roles = _ROLES.get(caller.method, self._roles)
        with self._guesses.count_failures({Reason.TOKEN_INVALID: credential.token_id}):
            record = self._tokens.check(credential, roles, unix_s())
        now_ms = monotonic_ms()
        if not self._calls.take(record.token_id, now_ms):
            detail = f"too many calls with token {record.token_id}"
            wait_ms = self._calls.wait_ms(record.token_id, now_ms)
            raise HyperGPUError(Reason.RATE_LIMITED, detail, wait_ms=wait_ms)
        caller.token = record
        caller.hold_stream = partial(self._streams.hold, f"token {record.token_id}")
        if record.role is Role.NODE:
            caller.own_nodes = await asyncio.to_thread(self._tokens.joined_nodes, record.token_id)
        caller.recheck = lambda: self._tokens.check_current(record.token_id, unix_s())
        caller.watch_token = partial(self._tokens.watch, record.token_id)


class NodeGate:
    """Admits nodes that joined: by their certificate, or by name alone where a gateway speaks for
    them or on a plaintext loopback.
    """

    def __init__(
        self, nodes: KnownNodes, *, is_plaintext: bool, tokens: IssuedTokens | None = None
    ) -> None:
        """Admit gateways whose token is one of `tokens` and good; none of them without."""
        self._tokens = tokens
        self._nodes = nodes
        self._is_plaintext = is_plaintext
        self._offers = RateLimiter(_OFFERS)
        self._calls = RateLimiter(NODE_CALLS)
        self._streams = OpenCounter(_NODE_STREAMS_MAX, "control streams")
        self._appointments = Appointments(_STREAMS_PER_S, _STREAMS_BURST)

    def let_in(self, node: NodeId) -> None:
        """Let a control stream open, for which the node has said hello.

        Raises:
            HyperGPUError: RATE_LIMITED, too many nodes dial at once, with the time to come again.
        """
        if wait_ms := self._appointments.wait_ms(node, monotonic_ms()):
            detail = f"many nodes dial at once: come again in {wait_ms} ms"
            raise HyperGPUError(Reason.RATE_LIMITED, detail, wait_ms=wait_ms)

    async def admit(self, caller: Caller) -> None:
        self._admit_gateway(caller)
        node = self.node(caller)
        self.check(node)
        reject_other_caller(caller)
        if caller.method == "NodeService.OfferUpdate":
            self.count_offer(node)
        self.count_message(node)
        caller.hold_stream = partial(self._streams.hold, f"node {node}")

    def _admit_gateway(self, caller: Caller) -> None:
        gateway_text = caller.certificate_name
        if self._is_plaintext:
            gateway_text = caller.metadata.get(GATEWAY_KEY, "")
        token_id, tokens = gateway_token(gateway_text), self._tokens
        if token_id is None or tokens is None:
            return
        tokens.check_current(token_id, unix_s())
        caller.gateway = token_id
        caller.recheck = lambda: tokens.check_current(token_id, unix_s())
        caller.watch_token = partial(tokens.watch, token_id)

    def admit_sender(self, node_text: str, protocol_text: str) -> NodeId:
        """Admit a node that sends an update, as a call would be.

        Args:
            node_text: Its name, by its certificate where there is TLS.
            protocol_text: Protocol that it says to speak.

        Raises:
            HyperGPUError: It is unknown, revoked, or too fast; or it speaks another protocol.
        """
        node = _node_id(node_text)
        self.check(node)
        reject_other_text(protocol_text)
        self.count_message(node)
        return node

    def count_offer(self, node: NodeId) -> None:
        """Count an offer of an update that was not offered before.

        Raises:
            HyperGPUError: RATE_LIMITED, they are too many.
        """
        if not self._offers.take(node, monotonic_ms()):
            raise HyperGPUError(Reason.RATE_LIMITED, f"too many offers from {node}")

    def count_message(self, node: NodeId) -> None:
        """Count a call of a node, or a message in its control stream.

        Raises:
            HyperGPUError: RATE_LIMITED, they are too many.
        """
        if not self._calls.take(node, monotonic_ms()):
            raise HyperGPUError(Reason.RATE_LIMITED, f"too many messages from {node}")

    def node(self, caller: Caller) -> NodeId:
        """The caller's id.

        Raises:
            HyperGPUError: NODE_UNKNOWN, it shows none.
        """
        node_text = caller.certificate_name
        if self._is_plaintext or caller.gateway is not None:
            node_text = caller.metadata.get(NODE_KEY, "")
        return _node_id(node_text)

    def check(self, node: NodeId) -> None:
        """Reject a node that never joined or was revoked.

        Raises:
            HyperGPUError: NODE_UNKNOWN or NODE_REVOKED.
        """
        self._nodes.check(node)


def reject_other_caller(caller: Caller) -> None:
    """Reject a caller whose metadata names another protocol, or none.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with the command that upgrades the older side.
    """
    reject_other_text(caller.metadata.get(PROTOCOL_KEY, "0"))


def reject_other_text(protocol_text: str) -> None:
    """Reject a peer that states another protocol, or none.

    Raises:
        HyperGPUError: VERSION_MISMATCH, with the command that upgrades the older side.
    """
    reject_other_protocol(
        int(protocol_text) if protocol_text.isdecimal() and len(protocol_text) < 9 else 0,
        "the caller",
    )


def _node_id(text: str) -> NodeId:
    """The id that a text is.

    Raises:
        HyperGPUError: NODE_UNKNOWN, it is none.
    """
    if not is_node_id(text):
        raise HyperGPUError(Reason.NODE_UNKNOWN, f"{text[:64]!r} is no node's id")
    return NodeId(text)


def peer_host(peer: str) -> str:
    """The address in gRPC's name of a peer, without the port."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in {"ipv4", "ipv6"} else peer


def address_digest(peer: str, *, is_gateway: bool) -> str:
    """Name of the address that a node dials from, by which two nodes of one line are told apart
    from others; of IPv6 that is the line's network. Empty: it is not known, behind a gateway or a
    tunnel that ends on this machine.
    """
    if is_gateway:
        return ""
    try:
        address = ipaddress.ip_address(unquote(peer_host(peer)).strip("[]").partition("%")[0])
    except ValueError:
        return ""
    if address.is_loopback:
        return ""
    line = ipaddress.ip_network(f"{address}/{_LINE_BITS[address.version]}", strict=False)
    return digest_of(str(line).encode())[:_ADDRESS_DIGITS]
