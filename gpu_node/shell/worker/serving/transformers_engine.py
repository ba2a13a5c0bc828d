"""Kind ``serve/transformers``: a causal language model that answers calls until its lease is void.

Conversations advance in turns, one token each, so that a long answer holds up no short one.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import torch
import transformers
from blake3 import blake3
from transformers import DynamicCache

from gpu_node.shell.worker.farm.base_folder import KeptModel
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import (
    CallOutput,
    CallWork,
    CancelCall,
    DoWork,
    ShardProgress,
    limits_from_environment,
)
from gpu_node.shell.worker.serving.answer_check import AnswerCheck
from gpu_node.shell.worker.serving.conversation import (
    ModelConversation,
    UnanswerableCallError,
    is_last,
)
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundles import Bundle
from hypergpu.packed_work import unpack_work
from hypergpu.serving.calls import (
    AnswerPart,
    AnswerRefused,
    ModelCall,
    ReplicaReady,
    pack_parts,
    unpack_call,
)
from hypergpu.serving.serve_request import ENGINE_KIND, Replica

_CONTEXT_USUAL = 8_192
"""Tokens at most where neither the model nor its user states a limit."""
_SIGN_S = 10.0
"""Time between two signs of life."""
_IDLE_S = 1.0
_CHECK_TOKENS = 8
_CHECK_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of logits, relative to the largest one, between one pass and several."""


def engine_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What answers calls; it keeps its model from one lease to the next."""
    models = KeptModel(LanguageModel.load)

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        replica = unpack_work(request.work, ENGINE_KIND, Replica)
        model = models.of(request, _base_of(replica))
        check_steps(model)
        ReplicaEngine(request, callbacks, model, replica).answer_calls()

    return perform


def _base_of(replica: Replica) -> Bundle:
    """The replica's files, as those of a bundle without items."""
    return Bundle(start=0, items=0, files=replica.files, parameters={"dtype": replica.dtype})


@torch.inference_mode()
def check_steps(model: LanguageModel) -> None:
    """Require that a text read in two passes gives what one pass gives.

    Raises:
        ShardError: The model keeps its state otherwise than token by token.
    """
    count = int(model.model.get_input_embeddings().num_embeddings)
    tokens = torch.tensor([[place * 7919 % count for place in range(_CHECK_TOKENS)]])
    tokens = tokens.to(model.device)
    whole = model.model(input_ids=tokens).logits[0, -1].float()
    cache = DynamicCache(config=model.model.config)
    model.model(input_ids=tokens[:, :-1], past_key_values=cache, use_cache=True)
    last = model.model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
    error = float((last.logits[0, -1].float() - whole).abs().max() / whole.abs().max())
    if not error <= _CHECK_ERROR.get(model.model.dtype, 0.1):
        kind = type(model.model).__name__
        detail = f"{kind} gives other numbers token by token than at once ({error:.2g} relative)"
        raise ShardError(f"{detail}: it cannot be served by this engine")


class ReplicaEngine:
    """A loaded model with the calls that it is answering."""

    def __init__(
        self, request: DoWork, callbacks: ShardCallbacks, model: LanguageModel, replica: Replica
    ) -> None:
        self._lease = request.lease
        self._callbacks = callbacks
        self._model = model
        self._replica = replica
        limits = [each for each in (replica.context_most, model.tokens_most) if each]
        self._tokens_most = min(limits, default=_CONTEXT_USUAL)
        self._conversations: dict[int, ModelConversation | AnswerCheck] = {}
        self._waiting: deque[CallWork] = deque()
        self._floor_s = limits_from_environment().step_floor_ms / 1000
        """No pass takes less, so that this machine may play a slower one."""
        self._signs = 0
        self._sign_at_s = 0.0

    def answer_calls(self) -> NoReturn:
        """Answer calls until the work is aborted.

        Raises:
            ShardAbortedError: The lease is void.
        """
        ready = ReplicaReady(
            tokens_most=self._tokens_most,
            fingerprint=_fingerprint(self._replica),
            device=self._model.device.type,
            takes_checks=True,
        )
        self._send(0, [ready])
        while True:
            self._callbacks.raise_if_aborted()
            self._give_sign()
            self._take_calls()
            self._begin_waiting()
            for number, conversation in [*self._conversations.items()]:
                self._advance(number, conversation)

    def _give_sign(self) -> None:
        """Say that the worker is well: one that is silent for too long is taken to hang."""
        now_s = time.monotonic()
        if now_s - self._sign_at_s >= _SIGN_S:
            self._sign_at_s = now_s
            self._signs += 1
            self._callbacks.report(ShardProgress(self._lease, self._signs, 0, 0.0))

    def _take_calls(self) -> None:
        wait_s = 0.0 if self._conversations or self._waiting else _IDLE_S
        while (call := self._callbacks.next_call(wait_s)) is not None:
            wait_s = 0.0
            if isinstance(call, CallWork):
                self._waiting.append(call)
            else:
                self._drop(call)

    def _drop(self, cancel: CancelCall) -> None:
        self._conversations.pop(cancel.call, None)
        self._waiting = deque(call for call in self._waiting if call.call != cancel.call)

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._conversations) < self._replica.conversations_most:
            call = self._waiting.popleft()
            try:
                conversation = self._conversation(unpack_call(call.body))
            except UnanswerableCallError as error:
                refusal = AnswerRefused(str(error), is_too_long=error.is_too_long)
                self._send(call.call, [refusal])
            except HyperGPUError as error:
                self._send(call.call, [AnswerRefused(error.message)])
            else:
                self._conversations[call.call] = conversation

    def _conversation(self, call: ModelCall) -> ModelConversation | AnswerCheck:
        begin = ModelConversation if call.claim is None else AnswerCheck
        return begin(self._model, call, self._tokens_most)

    def _advance(self, number: int, conversation: ModelConversation | AnswerCheck) -> None:
        began_s = time.monotonic()
        try:
            parts = conversation.step()
        except (MemoryError, torch.OutOfMemoryError):
            del self._conversations[number]
            reason = "the replica has no memory left for this conversation"
            self._send(number, [AnswerRefused(reason, is_lasting=False)])
            return
        time.sleep(max(0.0, began_s + self._floor_s - time.monotonic()))
        if is_last(parts):
            del self._conversations[number]
        if parts:
            self._send(number, parts)

    def _send(self, number: int, parts: list[AnswerPart]) -> None:
        output = CallOutput(self._lease, number, pack_parts(parts), is_last(parts))
        self._callbacks.send_output(output)


def _fingerprint(replica: Replica) -> str:
    """What answers depend on beside the call and the device."""
    digests = sorted(f"{name} {blob.digest}" for name, blob in replica.files.items())
    versions = (replica.dtype, torch.__version__, transformers.__version__)
    return blake3("\n".join([*digests, *versions]).encode()).hexdigest()[:16]


perform = engine_performer()
"""See `gpu_node.shell.worker.performers.Perform`."""
