"""`hypergpu join`: this machine becomes a node."""

import os
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

from hypergpu.command_line import program
from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError
from hypergpu.user.terminal.commands import usage_error
from hypergpu.user.terminal.output import note
from hypergpu.wire.credentials import Role, Token, parse_token

TOKEN_VARIABLE = "HYPERGPU_JOIN_TOKEN"
NAME_VARIABLE = "HYPERGPU_NODE_NAME"
CHECK_WITHIN_S = 15.0
WORTHLESS = frozenset({Reason.TOKEN_INVALID, Reason.TOKEN_REVOKED, Reason.AUTHORITY_MISMATCH})
SPENT = frozenset({Reason.TOKEN_EXPIRED, Reason.TOKEN_USED_UP})
LINE = "hypergpu join "
"""What people copy along with the token when they quote the whole line."""


def given_token(word: str | None) -> str:
    """The join token from the command line, stdin or the environment; empty when there is none.

    Raises:
        HyperGPUError: It is no token, or one for users.
    """
    if word == "-":
        word = sys.stdin.readline()
    text = (word or os.environ.get(TOKEN_VARIABLE, "")).strip().removeprefix(LINE).strip()
    if not text:
        return ""
    role = parse_token(text).role
    if role is not Role.NODE:
        detail = f"this token is one for a {role.value}; a join line holds one for a node"
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail)
    return text


class NodeWish(NamedTuple):
    """The node that this machine is to become."""

    state_dir: Path
    worker: str = ""
    name: str = ""
    limits: tuple[str, ...] = ()
    """``KEY=VALUE`` each."""
    devices: tuple[str, ...] = ()
    is_live: bool = False
    """Shown on this terminal; its logs go to a file."""


def become_node(word: str | None, wish: NodeWish) -> NoReturn:
    """Replace this process by the node's daemon; its exit status is the command's.

    The token reaches the daemon through a pipe, and with this process goes the argument that held
    it: other users of the machine can read arguments for as long as a process lives.

    Raises:
        HyperGPUError: There is no token and this machine has not joined before, or it is not one.
    """
    token, state_dir = given_token(word), wish.state_dir
    if not token and not has_joined(state_dir):
        raise usage_error(
            "there is no token, and this machine has not joined before",
            "paste the whole join line of hypergpu up or token create; or pass - and the token on"
            f" stdin; or set {TOKEN_VARIABLE}",
        )
    shared_options = ["--state-dir", str(state_dir)]
    if wish.worker:
        shared_options += ["--worker", wish.worker]
    shared_options += [word for limit in wish.limits for word in ("--limit", limit)]
    shared_options += [word for device in wish.devices for word in ("--device", device)]
    if wish.is_live:
        shared_options.append("--live")
    if wish.name:
        os.environ[NAME_VARIABLE] = wish.name
    os.environ.pop(TOKEN_VARIABLE, None)
    if token:
        check_token(parse_token(token), is_new=not has_joined(state_dir))
        put_on_stdin(token)
        command = program("gpu_node", "join", "--token-file", "-", *shared_options)
    else:
        note("this machine has joined before: it goes back to its coordinator")
        command = program("gpu_node", "run", *shared_options)
    os.execv(command[0], command)  # noqa: S606 - no shell is what is wanted


def check_token(token: Token, *, is_new: bool) -> None:
    """Ask its coordinator about a token before a worker is started for it.

    A token for nodes lists no jobs: a good one is refused for its role, a bad one for what is wrong
    with it. Whoever does not answer is left to the daemon, which tries again.

    Args:
        token: For nodes.
        is_new: Whether this machine has not joined before. One that has may join again with a
            token that has expired since.

    Raises:
        HyperGPUError: The token opens nothing, or another coordinator answers.
    """
    from hypergpu.user.client import Coordinator
    from hypergpu.user.client.connection import ConnectionTarget, listening

    try:
        with Coordinator(
            ConnectionTarget(listening(token.addresses), token, CHECK_WITHIN_S)
        ) as coordinator:
            coordinator.jobs()
    except HyperGPUError as error:
        if error.reason in WORTHLESS or (is_new and error.reason in SPENT):
            raise
    except RemoteFailureError:
        pass


def put_on_stdin(secret: str) -> None:
    """Let whatever runs next read ``secret`` as its only line of input."""
    read_end, write_end = os.pipe()
    # A token is far shorter than what a pipe holds, so this does not wait for a reader.
    os.write(write_end, f"{secret}\n".encode())
    os.close(write_end)
    os.dup2(read_end, sys.stdin.fileno())
    os.close(read_end)


def has_joined(state_dir: Path) -> bool:
    """Whether the node there has a coordinator; one that left it has none."""
    return (state_dir / "coordinator.json").exists()


def leave_coordinator(state_dir: Path, *words: str) -> NoReturn:
    """Replace this process by the one that makes the node leave."""
    command = program("gpu_node", "leave", "--state-dir", str(state_dir), *words)
    os.execv(command[0], command)  # noqa: S606 - no shell is what is wanted
