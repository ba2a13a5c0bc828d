"""Kind ``serve/gguf``: a GGUF file that llama.cpp computes."""

from collections.abc import Callable

from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.gguf_model import GgufModel
from gpu_node.shell.worker.serving.llama_library import PACKAGE
from gpu_node.shell.worker.serving.prefix_states import PrefixStates
from gpu_node.shell.worker.serving.replica_engine import EngineTraits, ReplicaEngine
from gpu_node.shell.worker.serving.token_engine import TokenEngine
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError
from hypergpu.packed_work import unpack_work
from hypergpu.serving.serve_request import GGUF_FILE, GGUF_KIND, Replica


class KeptGguf:
    """The newest file's model, for the next lease of the same."""

    def __init__(self) -> None:
        self._model: GgufModel | None = None
        self._blob: BlobRef | None = None

    def of(self, request: DoWork, replica: Replica) -> GgufModel:
        """The model of a replica.

        Raises:
            ShardError: The file cannot be used here.
        """
        blob = replica.files.get(GGUF_FILE)
        if blob is None:
            raise ShardError(f"the job has no file {GGUF_FILE!r}")
        if self._model is None or self._blob != blob:
            self._model = None  # frees the last model before the next takes memory
            try:
                self._model = GgufModel(request.input_path(blob))
            except HyperGPUError as error:
                raise ShardError(error.message) from error
            self._blob = blob
        return self._model


def engine_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What answers calls; it keeps its model from one lease to the next."""
    models = KeptGguf()

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        replica = unpack_work(request.work, GGUF_KIND, Replica)
        prefixes = PrefixStates()
        engine = TokenEngine.of(replica, models.of(request, replica), prefixes)
        traits = EngineTraits(libraries=(PACKAGE,), takes_checks=True, prefixes=prefixes)
        ReplicaEngine(request, callbacks, engine, replica, traits).answer_calls()

    return perform


perform = engine_performer()
"""See `gpu_node.shell.worker.performers.Perform`."""
