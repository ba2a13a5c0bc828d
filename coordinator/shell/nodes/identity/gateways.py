"""Gateways as a coordinator knows them: by the name in their certificate, which holds the token
that asked for it. Whoever revokes that token shuts the gateway out.
"""

import re

from hypergpu.ids import TokenId

NODE_KEY = "hypergpu-node"
"""Metadata that names the node where a gateway speaks for it, or there is no TLS, which is on
loopback only.
"""
GATEWAY_KEY = "hypergpu-gateway"
"""Metadata with a gateway's name where there is no TLS, which is on loopback only."""
HOSTS_MAX = 64
_NAME = re.compile(r"hypergpu-gateway\.([0-9a-f]{12})", re.ASCII)


def gateway_name(token_id: TokenId) -> str:
    """Common name of the certificate that a token asked for."""
    return f"hypergpu-gateway.{token_id}"


def gateway_token(name: str) -> TokenId | None:
    """The token in a gateway's name; None: it is no gateway's."""
    match = _NAME.fullmatch(name)
    return TokenId(match[1]) if match else None
