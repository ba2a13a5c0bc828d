"""The join line of `up`, the same one at each start for as long as it is good, and whose profile
commands on this machine use.
"""

from pathlib import Path

import msgspec

from hypergpu.client import ConnectionTarget, Coordinator
from hypergpu.client.settings import profile
from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError
from hypergpu.files import write_durably
from hypergpu.wire.token import Role, Token, parse_token, token_text

FILE_NAME = "join.token"
TTL_S = 24 * 3600
ANSWER_WITHIN_S = 15.0
LEAST_S = 3600
"""A line that ends sooner is hardly worth pasting: a new one is made."""


class JoinLine(msgspec.Struct, frozen=True):
    """What nodes paste."""

    token: str
    good_for_s: int


def standing_join_line(coordinator: Coordinator, folder: Path, named: Token) -> JoinLine:
    """The line kept in ``folder``, or a new one that is kept there for its owner alone.

    Args:
        coordinator: Whom nodes are to join.
        folder: The coordinator's data folder.
        named: A token with the addresses and the CA of this start.
    """
    path = folder / FILE_NAME
    kept = _kept_token(path)
    left_s = _left_s(coordinator, kept) if kept else 0
    if kept is None or left_s < LEAST_S:
        made = coordinator.create_token(Role.NODE, ttl_s=TTL_S, uses=0, label="up")
        kept, left_s = parse_token(made.token), TTL_S
    standing = msgspec.structs.replace(kept, addresses=named.addresses, authority=named.authority)
    text = token_text(standing)
    write_durably(path, f"{text}\n".encode())
    return JoinLine(text, left_s)


def _kept_token(path: Path) -> Token | None:
    try:
        return parse_token(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, HyperGPUError):
        return None


def _left_s(coordinator: Coordinator, kept: Token) -> int:
    for each in coordinator.tokens():
        if each.id == kept.id and not each.is_revoked:
            return TTL_S if each.expires_in_s is None else each.expires_in_s
    return 0


def living_owner(token_file: str) -> str:
    """The address of another coordinator that the profile names and that answers, else empty.

    Args:
        token_file: The operator's token of the coordinator that asks.
    """
    kept = profile()
    address, owners = kept.get("address", ""), kept.get("token_file", "")
    if not address or not owners or Path(owners) == Path(token_file):
        return ""
    return address if _is_alive(address, Path(owners)) else ""


def _is_alive(address: str, token_file: Path) -> bool:
    try:
        token = parse_token(token_file.read_text("utf-8"))
        with Coordinator(ConnectionTarget(address, token, ANSWER_WITHIN_S)) as owner:
            owner.jobs()
    except HyperGPUError as refused:
        return refused.reason is Reason.NOT_READY
    except (OSError, UnicodeDecodeError, RemoteFailureError):
        return False
    return True
