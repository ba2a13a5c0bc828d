"""Kind ``serve/server``: the owner's server answers."""

from collections.abc import Callable

from gpu_node.core.own_server import OwnServer
from gpu_node.shell.worker.own_server.engine import OwnServerEngine
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.replica_engine import EngineTraits, ReplicaEngine
from gpu_node.shell.worker.trainer import ShardCallbacks
from hypergpu.packed_work import unpack_work
from hypergpu.serving.serve_request import SERVER_KIND, Replica


def server_performer(server: OwnServer) -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What passes calls on."""

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        replica = unpack_work(request.work, SERVER_KIND, Replica)
        engine = OwnServerEngine(server, replica.model)
        traits = EngineTraits(continuation="none")
        ReplicaEngine(request, callbacks, engine, replica, traits).answer_calls()

    return perform
