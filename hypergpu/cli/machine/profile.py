"""Whose profile it is: a second coordinator on this machine leaves the first one's alone."""

from pathlib import Path

from hypergpu.client import Coordinator, Target
from hypergpu.client.settings import profile
from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError
from hypergpu.wire.token import parse_token

ANSWER_WITHIN_S = 15.0


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
        with Coordinator(Target(address, token, ANSWER_WITHIN_S)) as owner:
            owner.jobs()
    except HyperGPUError as refused:
        return refused.reason is Reason.NOT_READY
    except (OSError, UnicodeDecodeError, RemoteFailureError):
        return False
    return True
