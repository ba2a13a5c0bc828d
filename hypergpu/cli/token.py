"""`hypergpu token`: create, list, revoke."""

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.terminal.commands import (
    YEAR_S,
    AsJson,
    NoConfirmation,
    group,
    on_coordinator,
    seconds_within,
)
from hypergpu.terminal.output import (
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
    from hypergpu.client import Coordinator, TokenView

app = group("Make join lines and users' tokens; revoke them.")


class RoleName(Enum):
    """What a token is for."""

    NODE = "node"
    VIEWER = "viewer"
    USER = "user"
    OPERATOR = "operator"


@app.command()
@on_coordinator
def create(
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
    uses: Annotated[int, typer.Option("--uses", min=0, help="0: as often as one likes.")] = 0,
    label: Annotated[str, typer.Option("--label", help="For you, in the list.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a token; it is shown once."""
    from hypergpu.wire.credentials import Role

    made = coordinator.create_token(Role(role.value), ttl_s=int(ttl), uses=uses, label=label)
    if as_json:
        say_json(made)
        return
    say(f"hypergpu join {made.token}" if role is RoleName.NODE else made.token)
    hint = (
        "paste this line on the node" if role is RoleName.NODE else "keep it in a file of mode 600"
    )
    note(f"shown once; {hint}. Revoke it: hypergpu token revoke {made.id}")


@app.command()
@on_coordinator
def ls(coordinator: "Coordinator", *, as_json: AsJson = False) -> None:
    """List the tokens, without their secrets."""
    from hypergpu.client.values import Tokens

    tokens = coordinator.tokens()
    if as_json:
        say_json(Tokens(tokens))
        return
    columns = (
        Column("token"),
        Column("role"),
        Column("label", is_optional=True),
        Column("state"),
        *optional_numbers("expires in", "uses left"),
    )
    say_table(columns, [_token_row(token) for token in tokens], empty="no tokens")


def _token_row(token: "TokenView") -> tuple[str, ...]:

    if token.is_revoked:
        state = "revoked"
    elif token.expires_in_s == 0:
        state = "expired"
    else:
        state = "used up" if token.uses_left == 0 else "good"
    return (
        token.id,
        token.role,
        token.label or "-",
        state,
        "never" if token.expires_in_s is None else span(token.expires_in_s),
        "unlimited" if token.uses_left is None else str(token.uses_left),
    )


@app.command()
@on_coordinator
def revoke(
    coordinator: "Coordinator",
    token: Annotated[str, typer.Argument(help="A token's id or its beginning.")],
    *,
    yes: NoConfirmation = False,
) -> None:
    """Make a token worthless. Nodes that joined with it stay."""
    token_id = coordinator.find_token(token)
    if token_id == coordinator.token_id:
        confirm(f"revoke {token_id}, the token of this very command?", yes=yes)
    coordinator.revoke_token(token_id)
    say(f"{token_id} revoked")
