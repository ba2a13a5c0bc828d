"""Kind ``serve/stage``: some layers of a model that no node needs to hold whole."""

import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch
from blake3 import blake3
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import (
    CallOutput,
    CallWork,
    DoWork,
    ShardProgress,
    limits_from_environment,
)
from gpu_node.shell.worker.serving.loaded_stage import LoadedStage
from gpu_node.shell.worker.serving.replica_engine import free_state_bytes
from gpu_node.shell.worker.serving.stage_check import StageChecker
from gpu_node.shell.worker.serving.stage_layers import StageLayers
from gpu_node.shell.worker.serving.stage_link import StageLink
from gpu_node.shell.worker.serving.stage_queue import StageQueue
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.errors import HyperGPUError
from hypergpu.packed_work import unpack_work
from hypergpu.rings.frame_cipher import SealedFrameError
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import STAGE_KIND, StageWork, span_blobs
from hypergpu.serving.check_messages import (
    CheckRequest,
    HandStates,
    RecomputeStage,
    TakeAdapterValues,
    TakeStates,
    TellDigests,
)
from hypergpu.serving.stage_messages import (
    BeginAnswer,
    ComputePass,
    ForgetSession,
    JoinRing,
    ReplayRows,
    RingJoined,
    StageReady,
    StageRefused,
    StageReply,
    StageRequest,
    StageRows,
    pack_stage_message,
    stage_message_parts,
    unpack_stage_request,
)
from hypergpu.serving.training_messages import TrainBackward, TrainForward, TrainingRequest
from hypergpu.tensors.hidden_states import state_codec
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.base_model import positions_most
from hypergpu.workloads.networks.task import chosen_device
from hypergpu.workloads.slices.layer_slice import LayerSlice, SliceError

if TYPE_CHECKING:
    from gpu_node.shell.worker.serving.stage_training import StageTraining

_SIGN_S = 10.0
_IDLE_S = 1.0
_CONTEXT_USUAL = 8_192
"""Tokens at most where neither the model nor its user states a limit."""


def stage_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What computes passes; it keeps its layers from one lease to the next."""
    stages: dict[str, LoadedStage] = {}

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        work = unpack_work(request.work, STAGE_KIND, StageWork)
        key = _stage_key(work)
        if key not in stages:
            stages.clear()  # frees the last layers before the next take memory
            try:
                stages[key] = load_stage(request, work)
            except DatasetError as error:
                raise ShardError(str(error)) from error
            except SliceError as error:
                raise ShardError(f"the model cannot be held in stages: {error}") from error
            except HyperGPUError as error:
                raise ShardError(error.message) from error
        stages[key].forget_all()
        StageLoop(request, callbacks, stages[key], work).compute_passes()

    return perform


def _stage_key(work: StageWork) -> str:
    """What a stage in memory depends on: one that was held ready is the same as one that answers,
    whatever further files it has.
    """
    layer_names = frozenset(span_blobs(LayerSpan(0, work.cut.layers), work.cut.layers))
    own_names = frozenset(span_blobs(work.span, work.cut.layers))
    files = {
        name: blob
        for name, blob in work.files.items()
        if name in own_names or name not in layer_names
    }
    return msgspec.json.encode(replace(work, files=files), order="sorted").decode()


def load_stage(request: DoWork, work: StageWork) -> LoadedStage:
    """The layers of a node.

    Raises:
        ShardError: The work lacks files.
        DatasetError: Its settings are none that may be loaded.
        SliceError: Its layers are not those of the model.
        HyperGPUError: MANIFEST_INVALID, its index is not right.
    """
    device = torch.device(chosen_device().kind)
    layers = StageLayers(request, work, device)
    layer_slice = layers.load(work.span)
    _check_cut(layer_slice, work)
    limits = [work.context_most, positions_most(AutoModelForCausalLM, layers.config) or 0]
    tokens_most = min((each for each in limits if each), default=_CONTEXT_USUAL)
    text = layers.text() if layer_slice.is_last else None
    codec = state_codec(work.cut.codec)
    stage = LoadedStage(layer_slice, device, codec, text, tokens_most)
    if work.training is not None:
        # What it needs of peft takes seconds to import, and only training needs it.
        from gpu_node.shell.worker.serving.stage_training import StageTraining

        stage.training = StageTraining(layer_slice, device, codec, work.training)
    return stage


def _check_cut(layer_slice: LayerSlice, work: StageWork) -> None:
    """Refuse a cut that is not of this model: sizes of messages follow from it."""
    sizes = (layer_slice.layers_total, layer_slice.hidden_size)
    if sizes != (work.cut.layers, work.cut.hidden_size):
        raise SliceError(
            f"it has {sizes[0]} layers of width {sizes[1]}, and its cut states"
            f" {work.cut.layers} of {work.cut.hidden_size}"
        )


class StageLoop:
    """Answers what a stage is told, until its lease is void.

    Args:
        request: The stage's.
        callbacks: To the worker's loop.
        stage: Loaded.
        work: Settings.
    """

    def __init__(
        self, request: DoWork, callbacks: ShardCallbacks, stage: LoadedStage, work: StageWork
    ) -> None:
        if request.ring_key is None:
            raise ShardError("the daemon gave no key for the ring. Fix: restart the node")
        self._lease = request.lease
        self._callbacks = callbacks
        self._stage = stage
        self._work = work
        self._key_signature = request.ring_key.signature
        self._link = StageLink(
            request.lease.job_id,
            request.lease.number,
            work.span,
            work.cut.layers,
            request.ring_key,
        )
        layers = StageLayers(request, work, stage.device)
        self._checker = StageChecker(stage, layers, self._pause_check)
        self._floor_s = limits_from_environment().step_floor_ms / 1000
        """No pass takes less, so that this machine may play a slower one."""
        self._signs = 0
        self._sign_at_s = 0.0

    def compute_passes(self) -> NoReturn:
        """Answer until the work is aborted.

        Raises:
            ShardAbortedError: The lease is void.
        """
        self._send(0, self._ready(), is_last=False)
        self._callbacks.log(f"lease {self._lease.number}: {self._work.span} in memory")
        if self._stage.training is not None:
            self._train(self._stage.training)
        while True:
            self._callbacks.raise_if_aborted()
            self._give_sign()
            call = self._callbacks.next_call(_IDLE_S)
            # A pass that is cancelled is computed all the same: nobody hears of it.
            if isinstance(call, CallWork):
                self._answer(call)

    def _train(self, training: "StageTraining") -> NoReturn:
        """The same for a stage that trains, and answers once it has."""
        queue = StageQueue(self._callbacks.next_call, partial(self._send, reply=StageRows()))
        while True:
            self._callbacks.raise_if_aborted()
            self._give_sign()
            try:
                arrival = queue.next(_IDLE_S)
            except HyperGPUError as error:
                self._send(queue.newest, StageRefused(error.message))
                continue
            if arrival is None:
                continue
            began_s = time.monotonic()
            number, request = arrival
            if isinstance(request, TrainingRequest):
                bodies = stage_message_parts(self._link.perform(request, training.perform))
            else:
                bodies = [pack_stage_message(self._reply_to(request))]
            if isinstance(request, ComputePass | TrainForward | TrainBackward):
                time.sleep(max(0.0, began_s + self._floor_s - time.monotonic()))
            for place, body in enumerate(bodies):
                is_last = place == len(bodies) - 1
                output = CallOutput(self._lease, number, body, is_last, is_urgent=True)
                self._callbacks.send_output(output)

    def _ready(self) -> StageReady:
        speed = self._stage.speed
        floor_us = self._floor_s * 1e6
        return StageReady(
            tokens_most=self._stage.tokens_most,
            fingerprint=_fingerprint(self._work),
            device=self._stage.device.type,
            pass_us=max(speed.pass_us, floor_us),
            token_us=speed.token_us,
            layer_us=(speed.pass_us + speed.token_us) / self._stage.layer_slice.span.count,
            weights_bytes=self._stage.weights_bytes,
            token_bytes=self._stage.token_bytes,
            sessions_bytes=free_state_bytes(self._stage.device.type),
            key=self._link.public_key,
            key_signature=self._key_signature,
            takes_adapters=True,
        )

    def _give_sign(self) -> None:
        """Say that the worker is well: one that is silent for too long is taken to hang."""
        now_s = time.monotonic()
        if now_s - self._sign_at_s >= _SIGN_S:
            self._sign_at_s = now_s
            self._signs += 1
            self._callbacks.report(ShardProgress(self._lease, self._signs, 0, 0.0))

    def _answer(self, call: CallWork) -> None:
        began_s = time.monotonic()
        try:
            request = unpack_stage_request(call.body)
        except HyperGPUError as error:
            self._send(call.call, StageRefused(error.message))
            return
        reply = self._reply_to(request)
        if isinstance(request, ComputePass):
            time.sleep(max(0.0, began_s + self._floor_s - time.monotonic()))
        self._send(call.call, reply)

    def _reply_to(self, request: StageRequest) -> StageReply:
        match request:
            case ComputePass():
                return self._compute(request)
            case BeginAnswer():
                return self._stage.begin_answer(request)
            case ReplayRows():
                return self._seal(request, self._stage.replay(request))
            case JoinRing():
                return self._join(request)
            case ForgetSession(session=session):
                self._stage.forget(session)
                return StageRows()
            case _ if isinstance(request, CheckRequest):
                return self._check(request)
            case _:
                return StageRefused("this stage trains nothing")

    def _check(self, request: CheckRequest) -> StageReply:
        """Take a part in a check: of this stage, of a neighbour, or as the one that computes."""
        try:
            match request:
                case TellDigests():
                    return self._stage.tell_digests(request)
                case HandStates(checker=checker):
                    self._callbacks.log(f"hands {checker.node} states of a conversation to check")
                    replay = ReplayRows(request.session, request.start, request.count)
                    reply = self._stage.replay(replay)
                    return self._link.seal_for_checker(request, reply)
                case TakeStates():
                    return self._checker.take(request, self._link.open_for_check(request))
                case TakeAdapterValues():
                    return self._checker.take_adapter(request)
                case RecomputeStage():
                    return self._checker.recompute(request)
        except SealedFrameError as error:
            return StageRefused(str(error))

    def _pause_check(self) -> None:
        """Between the layers of a check, which may take longer than a sign of life may wait."""
        self._callbacks.raise_if_aborted()
        self._give_sign()

    def _join(self, request: JoinRing) -> StageReply:
        if reason := self._link.join(request):
            return StageRefused(reason)
        nodes = ", ".join(f"{each.span} on {each.node}" for each in self._link.members)
        self._callbacks.log(f"epoch {request.epoch} of the ring: {nodes}")
        return RingJoined()

    def _compute(self, request: ComputePass) -> StageReply:
        """Compute a pass on what the stage before has sealed, and seal it for the next one."""
        try:
            opened_request = self._link.open_states(request)
        except SealedFrameError as error:
            return StageRefused(f"what came from the stage before: {error}", blames_input=True)
        return self._seal(request, self._stage.compute(opened_request))

    def _seal(self, request: ComputePass | ReplayRows, reply: StageReply) -> StageReply:
        if not isinstance(reply, StageRows):
            return reply
        try:
            return self._link.seal_states(request.place, reply)
        except SealedFrameError as error:
            return StageRefused(str(error), is_lasting=False)

    def _send(self, number: int, reply: StageReply, *, is_last: bool = True) -> None:
        try:
            body = pack_stage_message(reply)
        except HyperGPUError as error:
            body = pack_stage_message(StageRefused(error.message))
        output = CallOutput(self._lease, number, body, is_last, is_urgent=True)
        self._callbacks.send_output(output)


def _fingerprint(work: StageWork) -> str:
    """What a stage's numbers depend on beside its inputs and the device."""
    digests = sorted(f"{name} {blob.digest}" for name, blob in work.files.items())
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return blake3("\n".join([*digests, work.dtype, *versions]).encode()).hexdigest()[:16]


perform = stage_performer()
"""See `gpu_node.shell.worker.performers.Perform`."""
