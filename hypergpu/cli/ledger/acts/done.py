"""What came of an act on a ledger."""

import msgspec


class Done(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/sent/1"):
    """What was sent and is in a block."""

    node: str
    """Whose key signed it."""
    hashes: list[str]
    said: str
    amounts: dict[str, str] = {}
    """What `said` speaks of, by name; whole units of the token's smallest, as text."""
    ready_at_s: int | None = None
    """When the same command can do what is left, by the chain's clock; None: nothing waits."""
