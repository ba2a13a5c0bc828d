"""The line that `hypergpu up` prints and `hypergpu join` takes."""

from pathlib import Path

import msgspec

from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError
from hypergpu.user.client import Coordinator
from hypergpu.user.terminal.commands import JOIN_LINE_NODES
from hypergpu.wire.credentials import Role, Token, parse_token, token_text

FILE_NAME = "join.token"
TTL_S = 24 * 3600
ANSWER_WITHIN_S = 15.0
LEAST_S = 3600
"""A line that ends sooner is hardly worth pasting: a new one is made."""


class JoinLine(msgspec.Struct, frozen=True):
    """What nodes paste."""

    token: str
    good_for_s: int
    nodes_left: int
    """How many more may join with it."""


def standing_join_line(
    coordinator: Coordinator, folder: Path, named: Token, nodes: int | None = None
) -> JoinLine:
    """The line kept in ``folder``, or a new one that is kept there for its owner alone.

    Args:
        coordinator: Whom nodes are to join.
        folder: The coordinator's data folder.
        named: A token with the addresses and the CA of this start.
        nodes: How many may join with it: a kept line for another number gives way to a new one.
            None: as many as are left of a kept line, and a new one is for the usual number.
    """
    path = folder / FILE_NAME
    kept_token = _kept_token(path)
    left_s, left_nodes = _remainder(coordinator, kept_token) if kept_token else (0, 0)
    if kept_token is None or left_s < LEAST_S or left_nodes < 1 or nodes not in (None, left_nodes):
        left_s, left_nodes = TTL_S, nodes or JOIN_LINE_NODES
        new_token = coordinator.create_token(Role.NODE, ttl_s=left_s, uses=left_nodes, label="up")
        kept_token = parse_token(new_token.token)
    standing_token = msgspec.structs.replace(
        kept_token, addresses=named.addresses, authority=named.authority
    )
    text = token_text(standing_token)
    write_durably(path, f"{text}\n".encode())
    return JoinLine(text, left_s, left_nodes)


def _kept_token(path: Path) -> Token | None:
    try:
        return parse_token(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, HyperGPUError):
        return None


def _remainder(coordinator: Coordinator, kept: Token) -> tuple[int, int]:
    """Seconds and nodes that a token is still good for; 0 nodes: their number is not stated."""
    for each in coordinator.tokens():
        if each.id == kept.id and not each.is_revoked:
            left_s = TTL_S if each.expires_in_s is None else each.expires_in_s
            return left_s, each.uses_left or 0
    return 0, 0
