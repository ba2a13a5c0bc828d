"""A server of models that the node's owner runs already, as the owner's file names it. Pure."""

from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec

_MODELS_MOST = 64
_KEYS = {"url", "models", "key_file", "beyond_loopback", "context"}
_CONTEXT_MOST = 1 << 20


class OwnServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that speaks OpenAI's protocol."""

    url: str
    """Its base URL, such as ``http://127.0.0.1:11434/v1``."""
    models: tuple[str, ...]
    """Models of it that others may call, by the names that it has for them."""
    key_file: str = ""
    """File with its API key, which only its owner may read; empty: it asks for none."""
    beyond_loopback: bool = False
    """Whether it may be another machine."""
    context: int = 0
    """Tokens of prompt and answer at most; 0: the server refuses what is too long."""

    def refusal_of(self, model: str) -> str:
        """Why a model is not served; empty: it is."""
        if model in self.models:
            return ""
        names = ", ".join(self.models)
        return f"its owner's server offers {names} and no model {model[:100]!r}"


def own_server(value: object) -> OwnServer:
    """The server of a table of the owner's file.

    Raises:
        ValueError: Says what the table must be.
    """
    if not isinstance(value, dict) or not value.keys() <= _KEYS:
        raise ValueError(f"a table in node.toml with {', '.join(sorted(_KEYS))}")
    models = value.get("models")
    if not isinstance(models, list) or not 0 < len(models) <= _MODELS_MOST:
        raise ValueError('a table with models = ["NAME"]')
    if not all(isinstance(name, str) and 0 < len(name) <= 100 for name in models):
        raise ValueError('a table with models = ["NAME"]')
    try:
        server = msgspec.convert({**value, "models": tuple(models)}, OwnServer)
    except msgspec.ValidationError as error:
        raise ValueError(f"a table of a server's settings: {error}") from error
    if not 0 <= server.context <= _CONTEXT_MOST:
        raise ValueError(f"a table with context from 0 to {_CONTEXT_MOST}")
    _check_url(server)
    return server


def _check_url(server: OwnServer) -> None:
    try:
        parts = urlsplit(server.url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        host, parts = "", urlsplit("")
    has_more = parts.username or parts.password or parts.query or parts.fragment
    if parts.scheme not in {"http", "https"} or not host or has_more:
        raise ValueError('a table with url = "http://127.0.0.1:PORT/v1", without a name or key')
    if not (server.beyond_loopback or is_loopback(host)):
        raise ValueError(
            f"a table whose url is on this machine, or has beyond_loopback = true: {host} is"
            " another one, and prompts of others would go to it"
        )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its text alone: names are never looked up for it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
