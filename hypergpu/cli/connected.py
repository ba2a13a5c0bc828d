"""Commands that talk to a coordinator: a decorator opens the connection and adds its options."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate

from hypergpu.terminal.options import Address, TokenFile

if TYPE_CHECKING:
    from hypergpu.client import Coordinator

_OPTIONS = {"address": Address, "token_file": TokenFile}


def on_coordinator(
    command: "Callable[Concatenate[Coordinator, ...], None]",
) -> Callable[..., None]:
    """Give a command a connection as its first argument, and ``--address`` and ``--token-file``."""

    @functools.wraps(command)
    def run(*args: Any, address: str | None, token_file: str | None, **options: Any) -> None:
        # Help must not wait for gRPC to be imported.
        from hypergpu.client import connect

        with connect(address, token_file=token_file) as coordinator:
            command(coordinator, *args, **options)

    _, *own = inspect.signature(command).parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in _OPTIONS.items()
    ]
    vars(run).pop("__wrapped__")
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in [*own, *added]}
    return run
