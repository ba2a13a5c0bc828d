"""Kind ``serve/transformers``: a causal language model as transformers loads it."""

from collections.abc import Callable

from gpu_node.shell.worker.farm.base_folder import KeptModel
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.prefix_states import PrefixStates
from gpu_node.shell.worker.serving.replica_engine import EngineTraits, ReplicaEngine
from gpu_node.shell.worker.serving.token_engine import TokenEngine
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from gpu_node.shell.worker.trainer import ShardCallbacks
from hypergpu.farm.bundles import Bundle
from hypergpu.packed_work import unpack_work
from hypergpu.serving.serve_request import ENGINE_KIND, Replica

_EXACT_DTYPE = "float32"


def engine_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What answers calls; it keeps its model from one lease to the next."""
    models = KeptModel(
        lambda folder, parameters, device: TransformersModel(
            LanguageModel.load(folder, parameters, device)
        )
    )

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        replica = unpack_work(request.work, ENGINE_KIND, Replica)
        prefixes = PrefixStates()
        engine = TokenEngine.of(replica, models.of(request, _base_of(replica)), prefixes)
        traits = EngineTraits(
            libraries=("torch", "transformers"),
            continuation="identical" if is_exact(replica, engine.device) else "similar",
            takes_checks=True,
            prefixes=prefixes,
        )
        ReplicaEngine(request, callbacks, engine, replica, traits).answer_calls()

    return perform


def is_exact(replica: Replica, device: str) -> bool:
    """Whether another replica on a like processor computes the same tokens."""
    return replica.dtype == _EXACT_DTYPE and device == "cpu"


def _base_of(replica: Replica) -> Bundle:
    """The replica's files, as those of a bundle without items."""
    return Bundle(start=0, items=0, files=replica.files, parameters={"dtype": replica.dtype})


perform = engine_performer()
"""See `gpu_node.shell.worker.performers.Perform`."""
