"""Kind ``serve/tuned``: a base of transformers with the adapter that a job trained.

Where the model stays as it is, the adapter is merged into the base in memory. Where it follows its
training, the adapter stays beside the base, so that the next one takes its place.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.answer_check import AnswerCheck
from gpu_node.shell.worker.serving.conversation import ModelConversation
from gpu_node.shell.worker.serving.engine import VersionAbsentError
from gpu_node.shell.worker.serving.prefix_states import PrefixStates
from gpu_node.shell.worker.serving.replica_engine import EngineTraits, ReplicaEngine
from gpu_node.shell.worker.serving.token_engine import TokenEngine, check_steps
from gpu_node.shell.worker.serving.transformers_engine import is_exact
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from gpu_node.shell.worker.serving.tuned_versions import (
    TunedVersions,
    VersionFiles,
    trained_parameters,
)
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError
from hypergpu.farm.base_files import is_base_file
from hypergpu.packed_work import unpack_work
from hypergpu.serving.calls import ModelCall
from hypergpu.serving.serve_request import TUNED_KIND, Replica
from hypergpu.serving.tuned_model import SERVED_WORKLOADS, Tuning, VersionOffer
from hypergpu.tensors.layout import Layout, LayoutError, layout_from_json
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import OptionError
from hypergpu.workloads.finetuning.base_model import load_config, load_tokenizer, positions_most
from hypergpu.workloads.finetuning.export import merged_model
from hypergpu.workloads.finetuning.row_files import BASE_FOLDER
from hypergpu.workloads.networks.exported import ExportError, TrainedModel
from hypergpu.workloads.networks.task import chosen_device, load_module, module_layout
from hypergpu.workloads.registry import (
    BuilderMissingError,
    UnknownWorkloadError,
    build_for_job,
    find,
)


class TunedEngine(TokenEngine):
    """Answers each call by the version that it states, or else by the newest.

    Args:
        model: At any version.
        context_most: Tokens of a prompt and its answer at most; 0: as many as the model takes.
        version_model: Gives the model at a version; None: it is not here.
        prefixes: What calls before have read; None: nothing is kept.
    """

    def __init__(
        self,
        model: TransformersModel,
        context_most: int,
        version_model: Callable[[int | None], TransformersModel | None],
        prefixes: PrefixStates | None = None,
    ) -> None:
        super().__init__(model, context_most, prefixes)
        self._version_model = version_model

    def open(self, call: ModelCall) -> ModelConversation | AnswerCheck:
        """See `AnswerEngine.open`."""
        model = self._version_model(call.version)
        if model is None:
            raise VersionAbsentError(f"the model of round {call.version} is not here any more")
        return self._begin(model, call)


class MergedVersion:
    """The one version of a model that stays as it is. See `ModelVersions`."""

    def __init__(self, version: int, model: TransformersModel) -> None:
        self.rounds = (version,)
        """See `ModelVersions`."""
        self._model = model

    def model(self, version: int | None) -> TransformersModel | None:
        """See `TunedVersions.model`."""
        return self._model if version in {None, self.rounds[-1]} else None

    def take_up(self, offer: VersionOffer) -> None:
        """Refuse: see `ModelVersions.take_up`."""
        detail = "its adapter is merged, and the model follows no training"
        raise ShardError(f"version {offer.version.round} is not taken up: {detail}")


class LoadedModel(NamedTuple):
    """A model with the versions that are here."""

    key: str
    """Equal ones have the same base."""
    model: TransformersModel
    versions: TunedVersions | MergedVersion


class KeptTuned:
    """The newest base with its adapters, for the next lease of the same."""

    def __init__(self) -> None:
        self._loaded: LoadedModel | None = None

    def of(self, request: DoWork, replica: Replica, tuning: Tuning) -> LoadedModel:
        """The model of a replica.

        Raises:
            ShardError: It cannot be made here.
        """
        key = _key(replica, tuning)
        if self._loaded is None or self._loaded.key != key:
            self._loaded = None  # frees the last model before the next takes memory
            self._loaded = _load_checked(key, request, replica, tuning)
        elif tuning.version.round not in self._loaded.versions.rounds:
            self._loaded.versions.take_up(VersionOffer(tuning.version))
        return self._loaded


def _key(replica: Replica, tuning: Tuning) -> str:
    version = None if tuning.follows else tuning.version
    parts = [replica.files, replica.dtype, tuning.job, tuning.options, tuning.layout, version]
    return msgspec.json.encode(parts, order="sorted").decode()


def _load_checked(key: str, request: DoWork, replica: Replica, tuning: Tuning) -> LoadedModel:
    try:
        return _load(key, request, replica, tuning)
    except HyperGPUError as error:
        raise ShardError(error.message) from error
    except (
        DatasetError,
        OptionError,
        ExportError,
        LayoutError,
        BuilderMissingError,
        UnknownWorkloadError,
    ) as error:
        raise ShardError(str(error)) from error


def _load(key: str, request: DoWork, replica: Replica, tuning: Tuning) -> LoadedModel:
    if tuning.workload not in SERVED_WORKLOADS:
        raise ShardError(f"models of workload {tuning.workload} write no texts")
    device = torch.device(chosen_device().kind)
    layout = layout_from_json(request.input_path(tuning.layout).read_bytes())
    files = VersionFiles(request, layout)
    flat = files.take(VersionOffer(tuning.version))
    with tempfile.TemporaryDirectory(prefix="base-") as name:
        folder = Path(name)
        _lay_out_base(request, replica.files, folder / BASE_FOLDER)
        # Rows are not packed here: a base is tried for that, which takes time.
        options = {**tuning.options, "base_dtype": replica.dtype, "packing": False}
        workload = build_for_job(find(tuning.workload), options, name)
        module: Any = workload.model().eval()
        _check_layout(tuning, layout, module_layout(module))
        load_module(module, layout, flat)
        if tuning.follows:
            language_model = module.to(device).adapted.get_base_model()
        else:
            trained_model = TrainedModel(tuning.workload, workload, module)
            language_model = merged_model(trained_model).to(device)
        base = folder / BASE_FOLDER
        tokens_most = positions_most(workload.auto, load_config(base))
        model = TransformersModel(
            LanguageModel(language_model.eval(), load_tokenizer(base), device, tokens_most)
        )
    if not tuning.follows:
        return LoadedModel(key, model, MergedVersion(tuning.version.round, model))
    versions = TunedVersions(model, trained_parameters(module), layout, files)
    versions.take_up(VersionOffer(tuning.version))
    return LoadedModel(key, model, versions)


def _check_layout(tuning: Tuning, layout: Layout, own_layout: Layout) -> None:
    if own_layout.digest != layout.digest:
        raise ShardError(
            f"workload {tuning.workload} has another model here than in the job."
            " Fix: install the same versions on the node and the coordinator"
        )


def _lay_out_base(request: DoWork, files: dict[str, BlobRef], folder: Path) -> None:
    """Link the files of a base into a folder."""
    folder.mkdir()
    for name, blob in files.items():
        if not is_base_file(name) or Path(name).name != name:
            raise ShardError(f"{name[:80]!r} is no file of a base")
        (folder / name).symlink_to(request.input_path(blob).resolve())


def engine_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What answers calls; it keeps its model from one lease to the next."""
    models = KeptTuned()

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        replica = unpack_work(request.work, TUNED_KIND, Replica)
        if replica.tuning is None:
            raise ShardError("the work names no training")
        loaded_model = models.of(request, replica, replica.tuning)
        check_steps(loaded_model.model)
        prefixes, versions = PrefixStates(), loaded_model.versions
        engine = TunedEngine(loaded_model.model, replica.context_most, versions.model, prefixes)
        traits = EngineTraits(
            libraries=("torch", "transformers", "peft"),
            continuation="identical" if is_exact(replica, engine.device) else "similar",
            takes_checks=True,
            versions=versions,
            prefixes=prefixes,
        )
        ReplicaEngine(request, callbacks, engine, replica, traits).answer_calls()

    return perform


perform = engine_performer()
"""See `gpu_node.shell.worker.performers.Perform`."""
