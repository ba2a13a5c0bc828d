"""A replica: an engine answers the calls of one lease until that is void.

Conversations advance in turns, one token each, so that a long answer holds up no short one. A call
whose state does not fit beside the others' waits until one of them is over.
"""

import time
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from typing import NamedTuple, NoReturn

import psutil
from blake3 import blake3

from gpu_node.shell.worker.protocol import (
    CallOutput,
    CallWork,
    CancelCall,
    DoWork,
    ShardProgress,
    limits_from_environment,
)
from gpu_node.shell.worker.serving.engine import (
    AnswerEngine,
    EngineConversation,
    ModelVersions,
    UnanswerableCallError,
    is_last,
)
from gpu_node.shell.worker.serving.prefix_states import PrefixStates
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.errors import HyperGPUError
from hypergpu.serving.calls import (
    AnswerPart,
    AnswerRefused,
    ModelCall,
    ReplicaReady,
    VersionTaken,
    pack_parts,
    unpack_call,
)
from hypergpu.serving.serve_request import Replica
from hypergpu.serving.tuned_model import VersionOffer

_SIGN_S = 10.0
"""Time between two signs of life."""
_IDLE_S = 1.0
_STATE_SHARE = 0.8
"""Part of the memory that is free once the model is loaded, for the state of conversations."""


class _WaitingCall(NamedTuple):
    number: int
    call: ModelCall


class _OpenConversation(NamedTuple):
    conversation: EngineConversation
    state_bytes: int
    """Memory that its state takes at most."""


class EngineTraits(NamedTuple):
    """What a replica says of its engine."""

    libraries: Sequence[str] = ()
    """Distributions whose versions decide an answer's digits."""
    continuation: str = "similar"
    """See `ReplicaReady.continuation`."""
    takes_checks: bool = False
    """See `ReplicaReady.takes_checks`."""
    gives_vectors: bool = False
    """Whether it answers calls that want a vector, and no others."""
    versions: ModelVersions | None = None
    """Versions of a training's model; None: the model stays as it is."""
    prefixes: PrefixStates | None = None
    """What calls before have read; None: nothing is kept."""
    state_bytes_most: int | None = None
    """Memory for the state of conversations; None: what is free once the model is loaded."""


class ReplicaEngine:
    """An engine with the calls that it is answering.

    Args:
        request: The replica's.
        callbacks: To the worker's loop.
        engine: Loaded.
        replica: Settings.
        traits: Of this engine.
    """

    def __init__(
        self,
        request: DoWork,
        callbacks: ShardCallbacks,
        engine: AnswerEngine,
        replica: Replica,
        traits: EngineTraits,
    ) -> None:
        self._lease = request.lease
        self._callbacks = callbacks
        self._engine = engine
        self._replica = replica
        self._traits = traits
        self._fingerprint = _fingerprint(replica, traits.libraries)
        state_bytes = traits.state_bytes_most
        self._state_bytes_most = (
            free_state_bytes(engine.device) if state_bytes is None else state_bytes
        )
        self._prefixes = traits.prefixes
        self._conversations: dict[int, _OpenConversation] = {}
        self._waiting: deque[_WaitingCall] = deque()
        self._unadmitted: dict[int, EngineConversation] = {}
        """The conversation of the first waiting call, where there is no memory for it yet."""
        self._floor_s = limits_from_environment().step_floor_ms / 1000
        """No pass takes less, so that this machine may play a slower one."""
        self._updates = 0
        self._signs = 0
        self._sign_at_s = 0.0

    def answer_calls(self) -> NoReturn:
        """Answer calls until the work is aborted.

        Raises:
            ShardAbortedError: The lease is void.
        """
        self._tell_ready()
        try:
            while True:
                self._callbacks.raise_if_aborted()
                self._give_sign()
                self._take_calls()
                self._begin_waiting()
                for number in [*self._conversations]:
                    self._advance(number)
        finally:
            for number in [*self._conversations]:
                self._end(number)

    def _tell_ready(self) -> None:
        memory, versions = self._engine.memory, self._traits.versions
        ready = ReplicaReady(
            tokens_most=self._engine.tokens_most,
            fingerprint=self._fingerprint,
            device=self._engine.device,
            continuation=self._traits.continuation,
            takes_checks=self._traits.takes_checks,
            weights_bytes=memory.weights_bytes,
            token_bytes=memory.token_bytes,
            versions=() if versions is None else versions.rounds,
            updates=self._updates,
            keeps_prefixes=self._prefixes is not None,
        )
        self._send(0, [ready])

    def _give_sign(self) -> None:
        """Say that the worker is well: one that is silent for too long is taken to hang."""
        now_s = time.monotonic()
        if now_s - self._sign_at_s >= _SIGN_S:
            self._sign_at_s = now_s
            self._signs += 1
            self._callbacks.report(ShardProgress(self._lease, self._signs, 0, 0.0))
            if self._prefixes is not None:
                self._prefixes.evict()

    def _take_calls(self) -> None:
        wait_s = 0.0 if self._conversations else _IDLE_S
        while (call := self._callbacks.next_call(wait_s)) is not None:
            wait_s = 0.0
            if isinstance(call, CallWork):
                self._take(call)
            else:
                self._drop(call)

    def _take(self, work: CallWork) -> None:
        try:
            call = unpack_call(work.body)
        except HyperGPUError as error:
            self._refuse(work.call, error.message)
            return
        if call.offer is None:
            self._waiting.append(_WaitingCall(work.call, call))
        else:
            self._take_up(work.call, call.offer)

    def _take_up(self, number: int, offer: VersionOffer) -> None:
        """Load a version. Answers that have begun go on with theirs."""
        versions = self._traits.versions
        try:
            if versions is None:
                raise ShardError("the model is no training's, and stays as it is")
            versions.take_up(offer)
        except (ShardError, MemoryError) as error:
            reason = str(error) or "there is no memory for another version"
            self._send(number, [AnswerRefused(reason, is_lasting=False)])
            return
        self._updates += 1
        if self._prefixes is not None:
            self._prefixes.keep_versions(versions.rounds)
        self._tell_ready()
        self._send(number, [VersionTaken(offer.version.round)])

    def _drop(self, cancel: CancelCall) -> None:
        self._end(cancel.call)
        self._unadmitted.pop(cancel.call, None)
        self._waiting = deque(each for each in self._waiting if each.number != cancel.call)

    def _end(self, number: int) -> None:
        entry = self._conversations.pop(number, None)
        if entry is not None:
            # Its memory is free for what it has read.
            self._note_room()
            entry.conversation.close()

    def _note_room(self) -> None:
        """Leave to states of calls before what open conversations do not take."""
        if self._prefixes is not None:
            self._prefixes.room_bytes = self._state_bytes_most - self._taken_bytes

    @property
    def _taken_bytes(self) -> int:
        return sum(entry.state_bytes for entry in self._conversations.values())

    def _begin_waiting(self) -> None:
        while self._waiting and len(self._conversations) < self._replica.conversations_most:
            waiting_call = self._waiting[0]
            try:
                has_begun = self._begin(waiting_call)
            except UnanswerableCallError as error:
                self._refuse_call(waiting_call.number, error)
            except MemoryError:
                self._refuse_for_memory(waiting_call.number)
            else:
                if not has_begun:
                    return
            self._waiting.popleft()

    def _begin(self, waiting_call: _WaitingCall) -> bool:
        """Begin to answer, unless others have to end before there is memory for it."""
        conversation = self._unadmitted.pop(waiting_call.number, None)
        if conversation is None:
            conversation = self._open(waiting_call.call)
        state_bytes = self._engine.memory.conversation_bytes(conversation.tokens_most)
        if self._taken_bytes + state_bytes > self._state_bytes_most:
            if not self._conversations:
                conversation.close()
                raise MemoryError
            self._unadmitted[waiting_call.number] = conversation
            return False
        self._conversations[waiting_call.number] = _OpenConversation(conversation, state_bytes)
        self._note_room()
        return True

    def _open(self, call: ModelCall) -> EngineConversation:
        if call.wants_vector == self._traits.gives_vectors:
            return self._engine.open(call)
        if call.wants_vector:
            reason = "the model writes texts and gives no vectors. Fix: serve one of embeddings"
        else:
            reason = "the model gives vectors and writes no texts. Fix: ask /v1/embeddings"
        raise UnanswerableCallError(reason)

    def _advance(self, number: int) -> None:
        began_s = time.monotonic()
        try:
            parts = self._conversations[number].conversation.step()
        except MemoryError:
            self._end(number)
            self._refuse_for_memory(number)
            return
        except UnanswerableCallError as error:
            self._end(number)
            self._refuse_call(number, error)
            return
        time.sleep(max(0.0, began_s + self._floor_s - time.monotonic()))
        if self._prefixes is not None:
            self._prefixes.evict()
        if is_last(parts):
            self._end(number)
        if parts:
            self._send(number, parts)

    def _refuse_for_memory(self, number: int) -> None:
        reason = "the replica has no memory left for this conversation"
        self._send(number, [AnswerRefused(reason, is_lasting=False)])

    def _refuse_call(self, number: int, error: UnanswerableCallError) -> None:
        part = AnswerRefused(str(error), is_lasting=error.is_lasting, is_too_long=error.is_too_long)
        self._send(number, [part])

    def _refuse(self, number: int, reason: str) -> None:
        self._send(number, [AnswerRefused(reason)])

    def _send(self, number: int, parts: list[AnswerPart]) -> None:
        output = CallOutput(self._lease, number, pack_parts(parts), is_last(parts))
        self._callbacks.send_output(output)


def free_state_bytes(device: str) -> int:
    """Memory that conversations may take on a kind of device, once the model is loaded."""
    limit_bytes = limits_from_environment().memory_bytes
    free_bytes = psutil.virtual_memory().available
    if device == "cuda" and (device_bytes := _free_device_bytes()):
        free_bytes = device_bytes
    elif limit_bytes:
        free_bytes = min(free_bytes, limit_bytes - psutil.Process().memory_info().rss)
    return max(0, round(_STATE_SHARE * free_bytes))


def _free_device_bytes() -> int:
    """Memory that the GPU has left; 0: torch does not know it."""
    import torch  # an engine without torch has no such device

    if not torch.cuda.is_available():
        return 0
    free_bytes, _ = torch.cuda.mem_get_info()
    return int(free_bytes)


def _fingerprint(replica: Replica, libraries: Sequence[str]) -> str:
    """What answers depend on beside the call and the device."""
    digests = sorted(f"{name} {blob.digest}" for name, blob in replica.files.items())
    if replica.tuning is not None:
        digests += [f"training {replica.tuning.job}", replica.tuning.layout.digest]
    digests = digests or [replica.model]  # A server's: nothing more is known of it.
    versions = (replica.dtype, *(f"{name} {version(name)}" for name in libraries))
    return blake3("\n".join([*digests, *versions]).encode()).hexdigest()[:16]
