"""Who may call what, decided before a method runs: protocol, identity, revocation, role, rate."""

from coordinator.shell.identity.guesses import GuessLimiter
from coordinator.shell.identity.nodes import KnownNodes
from coordinator.shell.identity.rate import Rate, RateLimiter
from coordinator.shell.identity.tokens import IssuedTokens
from coordinator.shell.servicers.wire.handlers import Caller
from coordinator.shell.servicers.wire.versions import reject_other_protocol
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.keys.signature import is_node_id
from hypergpu.process.clock import monotonic_ms, unix_s
from hypergpu.units import Milliseconds
from hypergpu.wire.protocol import PROTOCOL_KEY
from hypergpu.wire.token import Role, parse_authorization

NODE_KEY = "hypergpu-node"
"""Metadata that names the node when there is no TLS, which is on loopback only."""
_USERS = frozenset({Role.USER, Role.OPERATOR})
_OPERATORS = frozenset({Role.OPERATOR})
_HEADERS = Rate(burst=100, interval_ms=Milliseconds(50))
"""Update headers of one node: each may cost a row in the journal."""


class OpenGate:
    """Admits everybody: for the health service."""

    async def admit(self, caller: Caller) -> None:
        return


class JoinGate:
    """Admits whoever speaks our protocol; the join itself judges the token."""

    async def admit(self, caller: Caller) -> None:
        reject_other_caller(caller)


class TokenGate:
    """Admits holders of a user's or an operator's token."""

    def __init__(self, tokens: IssuedTokens, guesses: GuessLimiter, *, for_operators: bool) -> None:
        self._tokens = tokens
        self._guesses = guesses
        self._roles = _OPERATORS if for_operators else _USERS

    async def admit(self, caller: Caller) -> None:
        reject_other_caller(caller)
        with self._guesses.count_failures(peer_host(caller.peer), {Reason.TOKEN_INVALID}):
            credential = parse_authorization(caller.metadata.get("authorization", ""))
            self._tokens.check(credential, self._roles, unix_s())


class NodeGate:
    """Admits nodes that joined: by their certificate, or by name alone on a plaintext loopback."""

    def __init__(self, nodes: KnownNodes, *, is_plaintext: bool) -> None:
        self._nodes = nodes
        self._is_plaintext = is_plaintext
        self._headers = RateLimiter(_HEADERS)

    async def admit(self, caller: Caller) -> None:
        node = self.node(caller)
        self.check(node)
        reject_other_caller(caller)
        brings_header = caller.method == "NodeService.SubmitUpdate"
        if brings_header and not self._headers.take(node, monotonic_ms()):
            raise HyperGPUError(Reason.RATE_LIMITED, f"too many update headers from {node}")

    def node(self, caller: Caller) -> NodeId:
        """The caller's id.

        Raises:
            HyperGPUError: NODE_UNKNOWN, it shows none.
        """
        shown = caller.certificate_name
        if self._is_plaintext:
            shown = caller.metadata.get(NODE_KEY, "")
        if not is_node_id(shown):
            raise HyperGPUError(Reason.NODE_UNKNOWN, f"{shown[:64]!r} is no node's id")
        return NodeId(shown)

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
    spoken = caller.metadata.get(PROTOCOL_KEY, "0")
    reject_other_protocol(
        int(spoken) if spoken.isdecimal() and len(spoken) < 9 else 0, "the caller"
    )


def peer_host(peer: str) -> str:
    """The address in gRPC's name of a peer, without the port."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in {"ipv4", "ipv6"} else peer
