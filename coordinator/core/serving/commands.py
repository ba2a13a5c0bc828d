"""Commands of served models beside those of every leased work."""

import msgspec


class RequestSignature(msgspec.Struct, frozen=True):
    """Ask a node to sign a count of its tokens, if it is connected: `WindowSigned` answers."""

    window: int
