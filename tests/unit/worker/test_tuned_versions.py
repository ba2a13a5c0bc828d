"""The model of a training as a replica holds it: merged, or beside its base and taken round by
round.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.engine import AnswerEngine, VersionAbsentError, is_last
from gpu_node.shell.worker.serving.token_engine import TokenEngine
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from gpu_node.shell.worker.serving.tuned_engine import KeptTuned, LoadedModel, TunedEngine
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import JobId
from hypergpu.packed_work import pack_work
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.serving.serve_request import TUNED_KIND, Replica
from hypergpu.serving.tuned_model import (
    ModelVersion,
    Tuning,
    VersionDelta,
    VersionOffer,
    untrained_adapter,
)
from hypergpu.tensors.codec import apply_delta, encode_update
from hypergpu.tensors.layout import Flat, Layout
from hypergpu.units import Bytes
from hypergpu.workloads.entry import Options, complete_options
from hypergpu.workloads.finetuning.causal import CausalLmWorkload
from hypergpu.workloads.finetuning.export import merged_model
from hypergpu.workloads.networks.exported import TrainedModel
from hypergpu.workloads.networks.task import load_module, module_layout
from hypergpu.workloads.registry import find
from tests.tiny_bases import save_base

JOB = JobId("job-1")
GREEDY = Sampling(temperature=0.0)
CALL = ModelCall(text="number 7 comes", sampling=GREEDY, new_tokens_most=12)
CODEC = "int4"
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads it


class TuningKit(NamedTuple):
    """A base, an adapter's layout and the folder in which a node lays out blobs."""

    folder: Path
    data_dir: Path
    options: Options
    layout: Layout

    @property
    def request(self) -> DoWork:
        """Work whose inputs lie in the folder."""
        lease = Lease(JOB, 0, 1)
        return DoWork(lease, pack_work(TUNED_KIND, self.replica(self.adapter(0))), str(self.folder))

    def add(self, content: bytes) -> BlobRef:
        """Lay a blob out."""
        blob = BlobRef(digest_of(content), Bytes(len(content)))
        (self.folder / blob.digest).write_bytes(content)
        return blob

    def flat(self, rounds: int) -> Flat:
        """An adapter that changes what the base writes."""
        draws = np.random.default_rng(rounds + 1)
        flat = Flat.empty(self.layout)
        flat.parameters[:] = draws.normal(0, 0.4, flat.parameters.size)
        flat.integers[:] = 0
        return flat

    def adapter(self, rounds: int) -> ModelVersion:
        """The same as a version whose blob is laid out."""
        flat = self.flat(rounds)
        return ModelVersion(rounds, self.add(b"".join(each.tobytes() for each in flat)))

    def delta(self, before: ModelVersion, rounds: int) -> VersionOffer:
        """A version that a compressed difference leads to; the version itself is not laid out."""
        difference_flat = self.flat(rounds)
        difference_flat.parameters[:] *= np.float32(0.5)
        payload = encode_update(self.layout, CODEC, difference_flat, None).payload
        difference = self.add(bytes(payload))
        out = self.folder / "made"
        paths = self.folder / before.blob.digest, self.folder / difference.digest, out
        digest = apply_delta(*paths, layout=self.layout, codec=CODEC)
        version = ModelVersion(rounds, BlobRef(digest, Bytes(out.stat().st_size)))
        out.unlink()
        return VersionOffer(version, VersionDelta(before.blob.digest, difference, CODEC))

    def replica(self, version: ModelVersion, *, follows: bool = True) -> Replica:
        """The work of a node."""
        base = self.data_dir / "base"
        files = {path.name: self.add(path.read_bytes()) for path in base.iterdir()}
        replica_tuning = Tuning(
            job=JOB,
            workload="hf-causal-lm",
            options=dict(self.options),
            layout=self.add(self.layout.to_json()),
            version=version,
            follows=follows,
        )
        return Replica(model="tuned", files=files, tuning=replica_tuning)

    def load(self, replica: Replica) -> LoadedModel:
        """The model as a node has it."""
        assert replica.tuning is not None
        return KeptTuned().of(self.request, replica, replica.tuning)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> TuningKit:
    folder = tmp_path_factory.mktemp("tuned")
    data_dir, inputs = folder / "data", folder / "inputs"
    data_dir.mkdir()
    inputs.mkdir()
    save_base(data_dir)
    options = complete_options(find("hf-causal-lm"), {"sequence_length": 64, "rank": 4})
    layout = module_layout(CausalLmWorkload(options, str(data_dir)).model())
    return TuningKit(inputs, data_dir, options, layout)


def engine_of(loaded_model: LoadedModel) -> TunedEngine:
    return TunedEngine(loaded_model.model, 0, loaded_model.versions.model)


def tokens_of(engine: AnswerEngine, call: ModelCall) -> list[int]:
    conversation = engine.open(call)
    tokens = []
    while True:
        parts = conversation.step()
        tokens += [part.token for part in parts if isinstance(part, AnswerToken)]
        if is_last(parts):
            return tokens


def merged_tokens(kit: TuningKit, version: ModelVersion) -> list[int]:
    """Tokens of the model that an export of the version merges."""
    workload = CausalLmWorkload(kit.options, str(kit.data_dir))
    module = workload.model().eval()
    content = np.fromfile(kit.folder / version.blob.digest, np.uint8)
    load_module(module, kit.layout, Flat.view(kit.layout, content))
    merged_base = merged_model(TrainedModel("hf-causal-lm", workload, module))
    plain = LanguageModel.load(kit.data_dir / "base", {}, torch.device("cpu"))
    model = TransformersModel(plain._replace(model=merged_base.eval()))
    return tokens_of(TokenEngine(model), CALL)


def test_a_model_that_stays_as_it_is_gives_the_tokens_of_its_merged_export(kit: TuningKit) -> None:
    version = kit.adapter(1)
    loaded_model = kit.load(kit.replica(version, follows=False))
    assert tokens_of(engine_of(loaded_model), CALL) == merged_tokens(kit, version)
    assert loaded_model.versions.rounds == (1,)
    with pytest.raises(ShardError, match="follows no training"):
        loaded_model.versions.take_up(VersionOffer(kit.adapter(2)))


def test_one_that_follows_gives_the_tokens_of_each_round_s_merged_export(kit: TuningKit) -> None:
    first, second = kit.adapter(1), kit.adapter(2)
    loaded_model = kit.load(kit.replica(first))
    engine = engine_of(loaded_model)
    assert tokens_of(engine, CALL) == merged_tokens(kit, first)
    loaded_model.versions.take_up(VersionOffer(second))
    assert tokens_of(engine, CALL) == merged_tokens(kit, second)
    assert merged_tokens(kit, first) != merged_tokens(kit, second)


def test_an_answer_ends_on_the_version_that_it_began_with(kit: TuningKit) -> None:
    first, second, third = (kit.adapter(number) for number in (1, 2, 3))
    loaded_model = kit.load(kit.replica(first))
    engine = engine_of(loaded_model)
    whole = {1: merged_tokens(kit, first), 3: merged_tokens(kit, third)}
    conversation = engine.open(CALL)
    parts = [part for _ in range(3) for part in conversation.step()]
    loaded_model.versions.take_up(VersionOffer(second))
    loaded_model.versions.take_up(VersionOffer(third))
    newest = engine.open(CALL)
    newest_parts = newest.step()
    while not is_last(parts):  # by turns, as a replica has them
        parts += conversation.step()
        newest_parts += [] if is_last(newest_parts) else newest.step()
    while not is_last(newest_parts):
        newest_parts += newest.step()
    assert [part.token for part in parts if isinstance(part, AnswerToken)] == whole[1]
    assert [part.token for part in newest_parts if isinstance(part, AnswerToken)] == whole[3]
    assert loaded_model.versions.rounds == (2, 3)
    with pytest.raises(VersionAbsentError):
        engine.open(ModelCall(text="a", version=1))


def test_a_version_comes_by_the_difference_to_the_one_before(kit: TuningKit) -> None:
    first = kit.adapter(1)
    loaded_model = kit.load(kit.replica(first))
    offer = kit.delta(first, 2)
    before = tokens_of(engine_of(loaded_model), CALL)
    loaded_model.versions.take_up(offer)
    assert loaded_model.versions.rounds == (1, 2)
    assert tokens_of(engine_of(loaded_model), CALL) != before


def test_a_difference_to_another_version_is_refused_and_changes_nothing(kit: TuningKit) -> None:
    first, other = kit.adapter(1), kit.adapter(5)
    loaded_model = kit.load(kit.replica(first))
    whole = merged_tokens(kit, first)
    with pytest.raises(ShardError, match="another version"):
        loaded_model.versions.take_up(kit.delta(other, 6))
    wrong = VersionOffer(ModelVersion(6, kit.adapter(6).blob), kit.delta(first, 2).delta)
    with pytest.raises(ShardError, match="is not the model of round 6"):
        loaded_model.versions.take_up(wrong)
    assert tokens_of(engine_of(loaded_model), CALL) == whole


def test_another_lease_of_the_same_base_loads_the_version_alone(kit: TuningKit) -> None:
    kept_models, first, second = (
        KeptTuned(),
        kit.replica(kit.adapter(1)),
        kit.replica(kit.adapter(2)),
    )
    assert first.tuning is not None
    assert second.tuning is not None
    before = kept_models.of(kit.request, first, first.tuning)
    after = kept_models.of(kit.request, second, second.tuning)
    assert after.model is before.model
    assert after.versions.rounds == (1, 2)


def test_an_adapter_before_its_training_changes_nothing_of_the_base(kit: TuningKit) -> None:
    untrained_version = ModelVersion(0, kit.add(untrained_adapter(kit.layout)))
    base = LanguageModel.load(kit.data_dir / "base", {}, torch.device("cpu"))
    base_tokens = tokens_of(TokenEngine(TransformersModel(base)), CALL)
    loaded_model = kit.load(kit.replica(untrained_version, follows=False))
    assert tokens_of(engine_of(loaded_model), CALL) == base_tokens


def test_an_adapter_of_another_base_is_refused(kit: TuningKit, tmp_path: Path) -> None:
    save_base(tmp_path, hidden_size=64)
    replica = kit._replace(data_dir=tmp_path).replica(kit.adapter(1))
    with pytest.raises(ShardError, match="another model here than in the job"):
        kit.load(replica)
