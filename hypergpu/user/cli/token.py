"""`hypergpu token`: create, list, revoke."""

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.units import several
from hypergpu.user.cli import token_keys
from hypergpu.user.terminal.commands import (
    JOIN_LINE_NODES,
    YEAR_S,
    AsJson,
    JoinLineNodes,
    NoConfirmation,
    group,
    on_coordinator,
    seconds_within,
    usage_error,
)
from hypergpu.user.terminal.output import (
    Column,
    confirm,
    note,
    optional_numbers,
    say,
    say_json,
    say_table,
    span,
)

if TYPE_CHECKING:
    from hypergpu.user.client import Coordinator, TokenView

app = group("Make join lines, users' tokens and keys that sign their jobs; revoke them.")
for _name, _command in (
    ("new-key", token_keys.new_key),
    ("rotate-key", token_keys.rotate_key),
    ("keys", token_keys.keys),
    ("revoke-key", token_keys.revoke_key),
):
    app.command(_name)(_command)


class RoleName(Enum):
    """What a token is for."""

    NODE = "node"
    VIEWER = "viewer"
    USER = "user"
    OPERATOR = "operator"


@app.command()
@on_coordinator
def create(  # noqa: PLR0913 - each is an option
    coordinator: "Coordinator",
    *,
    role: Annotated[RoleName, typer.Option("--role", help="Who will hold it.")] = RoleName.NODE,
    ttl: Annotated[
        float,
        typer.Option(
            "--ttl",
            parser=seconds_within(1, YEAR_S),
            metavar="DURATION",
            help="Time for which it is good, such as 30m; else 24h.",
            show_default=False,
        ),
    ] = 86_400.0,
    nodes: JoinLineNodes = None,
    label: Annotated[str, typer.Option("--label", help="For you, in the list.")] = "",
    gateway: Annotated[
        list[str] | None,
        typer.Option(
            "--gateway",
            metavar="HOST:PORT",
            help="A gateway for it to name in place of the coordinator; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token; it is shown once."""
    from msgspec.structs import replace

    from hypergpu.wire.credentials import Role, with_addresses

    if nodes is not None and role is not RoleName.NODE:
        raise usage_error(f"nothing joins with a token of the role {role.value}", "leave --nodes")
    uses = (nodes or JOIN_LINE_NODES) if role is RoleName.NODE else 0
    new_token = coordinator.create_token(Role(role.value), ttl_s=int(ttl), uses=uses, label=label)
    if gateway:
        new_token = replace(new_token, token=with_addresses(new_token.token, tuple(gateway)))
    if as_json:
        say_json(new_token)
        return
    say(f"hypergpu join {new_token.token}" if role is RoleName.NODE else new_token.token)
    hint = "keep it in a file of mode 600"
    if role is RoleName.NODE:
        hint = f"paste this line on {several(uses, 'node')} at most"
    note(f"shown once; {hint}. Revoke it: hypergpu token revoke {new_token.id}")


@app.command()
@on_coordinator
def ls(coordinator: "Coordinator", *, as_json: AsJson = False) -> None:
    """List the tokens, without their secrets."""
    from hypergpu.user.client.values import Tokens

    tokens = coordinator.tokens()
    if as_json:
        say_json(Tokens(tokens))
        return
    columns = (
        Column("token"),
        Column("role"),
        Column("label", is_optional=True),
        Column("state"),
        *optional_numbers("expires in", "nodes left"),
    )
    say_table(columns, [_token_row(token) for token in tokens], empty="no tokens")


def _token_row(token: "TokenView") -> tuple[str, ...]:

    if token.is_revoked:
        state = "revoked"
    elif token.expires_in_s == 0:
        state = "expired"
    else:
        state = "used up" if token.uses_left == 0 else "good"
    nodes_left = "any number" if token.uses_left is None else str(token.uses_left)
    return (
        token.id,
        token.role,
        token.label or "-",
        state,
        "never" if token.expires_in_s is None else span(token.expires_in_s),
        nodes_left if token.role == RoleName.NODE.value else "-",
    )


@app.command()
@on_coordinator
def revoke(
    coordinator: "Coordinator",
    token: Annotated[str, typer.Argument(help="A token's id or its beginning.")],
    *,
    yes: NoConfirmation = False,
) -> None:
    """Make a token worthless and shut out every node that joined with it, at once."""
    token_id = coordinator.find_token(token)
    if token_id == coordinator.token_id:
        confirm(f"revoke {token_id}, the token of this very command?", yes=yes)
    nodes = coordinator.revoke_token(token_id)
    shut_out_text = f"; {several(nodes, 'node')} that joined with it shut out" if nodes else ""
    say(f"{token_id} revoked{shut_out_text}")
    if nodes:
        note("to keep one of them: hypergpu node readmit NODE")
