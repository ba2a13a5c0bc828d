"""`hypergpu key`: keys of the API on this machine."""

from typing import Annotated, NamedTuple

import typer

from hypergpu.user.terminal.commands import (
    YEAR_S,
    AsJson,
    group,
    seconds_within,
    with_options,
)
from hypergpu.user.terminal.output import (
    Column,
    note,
    numbers,
    say,
    say_json,
    say_table,
)

app = group("Make keys of the API that `hypergpu serve` has; list and revoke them.")


class KeyOptions(NamedTuple):
    """Limits of a key."""

    model: Annotated[
        list[str] | None,
        typer.Option("--model", help="A model that it may call; repeatable; else all of yours."),
    ] = None
    budget: Annotated[
        int | None,
        typer.Option("--budget", min=1, metavar="TOKENS", help="Tokens that it may use in all."),
    ] = None
    ttl: Annotated[
        float | None,
        typer.Option(
            "--ttl",
            parser=seconds_within(1, YEAR_S),
            metavar="DURATION",
            help="Time for which it is good, such as 30m; else for good.",
            show_default=False,
        ),
    ] = None
    per_minute: Annotated[
        int | None,
        typer.Option("--per-minute", min=1, max=60_000, metavar="N", help="Requests a minute."),
    ] = None
    priority: Annotated[
        int,
        typer.Option(
            "--priority", min=-100, max=100, help="Its calls go before those of lower ones."
        ),
    ] = 0


@app.command()
@with_options(KeyOptions)
def add(
    options: KeyOptions,
    name: Annotated[str, typer.Argument(help="For you, in the list.")] = "",
    *,
    as_json: AsJson = False,
) -> None:
    """Make a key; it is shown once."""
    from hypergpu.user.serving.server import open_keys

    key = open_keys().add(
        name,
        models=tuple(options.model or ()),
        tokens_most=options.budget,
        lasts_s=int(options.ttl or 0),
        calls_per_minute=options.per_minute,
        priority=options.priority,
    )
    if as_json:
        say_json(key)
        return
    say(key.key)
    note(f"it is shown once; revoke it: hypergpu key revoke {key.id}")


@app.command(name="ls")
def list_keys(*, as_json: AsJson = False) -> None:
    """List keys."""
    from hypergpu.user.serving.api_keys import ApiKeyList
    from hypergpu.user.serving.server import open_keys

    keys = open_keys().all()
    if as_json:
        say_json(ApiKeyList(keys))
        return
    columns = (
        Column("KEY"),
        Column("NAME"),
        Column("STATE"),
        Column("MODELS"),
        *numbers("USED", "BUDGET", "A MINUTE", "PRIORITY"),
    )
    rows = [
        (
            key.id,
            key.name,
            "good" if key.is_good else "revoked" if key.is_revoked else "over",
            ", ".join(key.models) or "all",
            str(key.tokens_used),
            "" if key.tokens_most is None else str(key.tokens_most),
            "" if key.calls_per_minute is None else str(key.calls_per_minute),
            str(key.priority),
        )
        for key in keys
    ]
    say_table(columns, rows, empty="there is no key: hypergpu key add")


@app.command()
def revoke(name: Annotated[str, typer.Argument(metavar="KEY", help="Its id or name.")]) -> None:
    """Void a key at once, also in the middle of an answer."""
    from hypergpu.user.serving.server import open_keys

    key = open_keys().revoke(name)
    say(f"{key.id} is revoked")
