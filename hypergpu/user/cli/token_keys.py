"""`hypergpu token`: keys by which this user's farm jobs are signed."""

from typing import TYPE_CHECKING, Annotated

import typer

from hypergpu.units import several
from hypergpu.user.terminal.commands import AsJson, on_coordinator, usage_error
from hypergpu.user.terminal.output import Column, note, say, say_json, say_table

if TYPE_CHECKING:
    from hypergpu.user.client import Coordinator

Label = Annotated[str, typer.Option("--label", help="For you, in the list.")]


@on_coordinator
def new_key(
    coordinator: "Coordinator",
    *,
    label: Label = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace a key that is here already.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a key that signs your farm jobs, and register it for your token."""
    from hypergpu.user.client.spec_keys import fresh_key, keep_key, key_path

    token_id = coordinator.token_id
    if not force and key_path(token_id).exists():
        raise usage_error(
            f"{key_path(token_id)} has a key already", "replace it: hypergpu token rotate-key"
        )
    own_key = fresh_key()
    coordinator.register_spec_key(own_key, label)
    path = keep_key(token_id, own_key)
    _say_key(own_key.public.hex(), str(path), as_json=as_json)


@on_coordinator
def rotate_key(coordinator: "Coordinator", *, label: Label = "", as_json: AsJson = False) -> None:
    """Replace your key by one that it names: nodes that know the old one take the new one."""
    from hypergpu.user.client.spec_keys import keep_key, load_key

    token_id = coordinator.token_id
    before = load_key(token_id)
    if before is None:
        raise usage_error("there is no key here", "make one: hypergpu token new-key")
    own_key = before.successor()
    coordinator.register_spec_key(own_key, label)
    path = keep_key(token_id, own_key)
    _say_key(own_key.public.hex(), str(path), as_json=as_json)


def _say_key(key: str, path: str, *, as_json: bool) -> None:
    from hypergpu.user.client.spec_keys import SpecKeyMade

    if as_json:
        say_json(SpecKeyMade(key, path))
        return
    say(key)
    note(f'kept in {path}; owners of nodes pin it in node.toml: spec_keys = ["{key}"]')


@on_coordinator
def keys(coordinator: "Coordinator", *, as_json: AsJson = False) -> None:
    """List keys that sign your farm jobs; an operator sees all."""
    from hypergpu.user.client.spec_keys import SpecKeyList

    views = coordinator.spec_keys()
    if as_json:
        say_json(SpecKeyList(views))
        return
    columns = (Column("key"), Column("token"), Column("label", is_optional=True), Column("state"))
    rows = [(each.key, each.token, each.label or "-", each.state) for each in views]
    say_table(columns, rows, empty="no keys: jobs are not signed")


@on_coordinator
def revoke_key(
    coordinator: "Coordinator",
    key: Annotated[str, typer.Argument(help="A key, or the beginning of it.")],
) -> None:
    """Revoke a key for good; farm jobs that it signed are paused."""
    matches = [each.key for each in coordinator.spec_keys() if each.key.startswith(key.lower())]
    if len(matches) != 1:
        raise usage_error(f"{len(matches)} keys begin with {key!r}", "hypergpu token keys")
    jobs = coordinator.revoke_spec_key(bytes.fromhex(matches[0]))
    say(f"{matches[0]} revoked; {several(jobs, 'job')} paused")
