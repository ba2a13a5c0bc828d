"""How the worker that reaches the owner's server is started."""

import msgspec

from gpu_node.core.own_server import OwnServer

OWN_SERVER_MODULE = "gpu_node.shell.worker.own_server"
VARIABLE = "HYPERGPU_WORKER_OWN_SERVER"
"""Environment variable with the owner's server as JSON. It names the key's file, never the key."""


def own_server_variables(server: OwnServer) -> dict[str, str]:
    """The variable's value."""
    return {VARIABLE: msgspec.json.encode(server).decode()}
