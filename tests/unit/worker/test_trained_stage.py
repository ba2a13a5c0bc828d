"""A worker's stage that trains, from the files of its layers to what it answers afterwards."""

from collections import deque
from pathlib import Path

import pytest
import torch

from gpu_node.shell.worker.protocol import CallOutput, CallWork, DoWork, RingKey
from gpu_node.shell.worker.serving.stage_engine import stage_performer
from gpu_node.shell.worker.trainer import ShardAbortedError, ShardCallbacks
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.farm.base_files import BASE_INDEX, WEIGHTS_SUFFIX, is_base_file
from hypergpu.ids import JobId
from hypergpu.packed_work import pack_work
from hypergpu.rings.frame_cipher import generate_ring_secret
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.stage_work import STAGE_KIND, ModelCut, StageWork
from hypergpu.serving.calls import ModelCall, Sampling
from hypergpu.serving.stage_messages import (
    AnswerOpened,
    BeginAnswer,
    ComputePass,
    StageJudged,
    StageReady,
    StageRefused,
    StageReply,
    StageRequest,
    StageSegment,
    stage_message_parts,
    unpack_stage_reply,
)
from hypergpu.serving.training_messages import (
    AdapterKept,
    AdapterReady,
    GiveAdapter,
    Gradients,
    KeepAdapter,
    StepAdapter,
    TrainForward,
    UseAdapter,
)
from hypergpu.units import Bytes
from hypergpu.user.farm.folder_parts import FolderNames, folder_files, folder_parts
from hypergpu.workloads.finetuning.base_model import load_config
from hypergpu.workloads.slices.layer_blobs import SourceTensors, write_blobs
from tests.tiny_bases import save_base

LEASE = Lease(JobId("job"), 0, 1)
LAYERS = 2
TRAINING = RingTraining(rounds=1, inner_steps=2, batch_rows=1, rank=4, learning_rate=0.05)
ROW = tuple(range(20, 32))


def stage_work(folder: Path, training: RingTraining | None) -> DoWork:
    """The work of a stage that has all layers of a tiny model, with its files."""
    base = save_base(folder, num_hidden_layers=LAYERS)
    inputs = folder / "inputs"
    inputs.mkdir()
    config = load_config(base)
    contents = {
        path.name: path.read_bytes()
        for path in write_blobs(config, SourceTensors(base.glob("*.safetensors")), folder)
    }
    settings = {
        name: path
        for name, path in folder_files(base, is_base_file).items()
        if not name.endswith(WEIGHTS_SUFFIX)
    }
    parts = folder_parts(settings, FolderNames("the model", "settings", ""))
    contents |= {BASE_INDEX: parts.index_content}
    contents |= {name: path.read_bytes() for name, path in parts.large_files.items()}
    files = {}
    for name, content in contents.items():
        files[name] = BlobRef(digest_of(content), Bytes(len(content)))
        (inputs / files[name].digest).write_bytes(content)
    cut = ModelCut(layers=LAYERS, hidden_size=32, layer_bytes=1, end_bytes=1, stages=1)
    work = StageWork(
        model="tiny", files=files, span=LayerSpan(0, LAYERS), cut=cut, training=training
    )
    key = RingKey(generate_ring_secret(), bytes(64))
    return DoWork(LEASE, pack_work(STAGE_KIND, work), str(inputs), ring_key=key)


def replies_of(work: DoWork, *requests: StageRequest) -> list[StageReply]:
    """What the stage says to requests that came one after another, once it is ready."""
    bodies = [body for request in requests for body in stage_message_parts(request)]
    calls = deque(CallWork(LEASE, number, body) for number, body in enumerate(bodies, start=1))
    outputs = list[CallOutput]()

    def raise_if_aborted() -> None:
        if len(outputs) > len(bodies):
            raise ShardAbortedError

    callbacks = ShardCallbacks(
        raise_if_aborted,
        lambda _: None,
        lambda _: None,
        lambda _: calls.popleft() if calls else None,
        outputs.append,
    )
    with pytest.raises(ShardAbortedError):
        stage_performer()(work, callbacks)
    return [unpack_stage_reply(output.body) for output in outputs]


def test_a_stage_trains_keeps_its_adapter_and_answers_with_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    forward = TrainForward(
        micro_batch=0, lengths=(len(ROW),), tokens=ROW, labels=ROW, weight=0.1, ends_step=True
    )
    call = ModelCall(tokens=ROW[:4], sampling=Sampling(temperature=0.0), new_tokens_most=4)
    a_pass = ComputePass(segments=(StageSegment(1, 0, 4, 1),), tokens=ROW[:4])
    step = StepAdapter(0.005, 1.0)
    ready, *replies = replies_of(
        stage_work(tmp_path, TRAINING),
        UseAdapter(0),
        *(forward, step, forward, step),
        KeepAdapter(2),
        GiveAdapter(2, 0),
        UseAdapter(0),
        forward,
        UseAdapter(2),
        forward,
        BeginAnswer(1, call),
        a_pass,
    )
    assert isinstance(ready, StageReady)
    losses = [reply.loss for reply in replies if isinstance(reply, Gradients)]
    assert len(losses) == 4
    assert losses[3] < losses[1] < losses[0]
    assert losses[2] == losses[0]
    (kept_adapter,) = [reply for reply in replies if isinstance(reply, AdapterKept)]
    # Seven linear layers of 32 to 64 outputs, B of rank 4 with two moments, and the steps.
    outputs = 32 + 16 + 16 + 32 + 64 + 64 + 32
    assert len(kept_adapter.content) == 4 * (3 * 4 * outputs + 1)
    assert replies.count(AdapterReady()) == 6
    assert [type(reply) for reply in replies[-2:]] == [AnswerOpened, StageJudged]


def test_a_stage_that_trains_nothing_says_so(tmp_path: Path) -> None:
    _, reply = replies_of(stage_work(tmp_path, None), UseAdapter(0))
    assert reply == StageRefused("this stage trains nothing")
