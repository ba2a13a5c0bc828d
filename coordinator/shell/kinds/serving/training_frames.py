"""Sealed activations and gradients on their way between stages of a ring that trains."""

from coordinator.shell.kinds.serving.training_batches import MicroBatch
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.stage_work import ModelCut
from hypergpu.serving.stage_messages import frame_bytes_most
from hypergpu.tensors.hidden_states import state_codec


class TrainingFrames:
    """Frames of one ring.

    Args:
        cut: How the model is cut.
        training: Settings.
    """

    def __init__(self, cut: ModelCut, training: RingTraining) -> None:
        self._row_bytes = state_codec(cut.codec).row_bytes(cut.hidden_size)
        self._gradient_row_bytes = state_codec(training.gradient_codec).row_bytes(cut.hidden_size)
        self._states: dict[tuple[int, int], bytes] = {}
        """By the stage that takes them and the micro-batch."""
        self._gradients: dict[tuple[int, int], bytes] = {}

    def clear(self) -> None:
        """Forget all."""
        self._states.clear()
        self._gradients.clear()

    def states_for(self, stage: int, number: int) -> bytes:
        """Activations that a stage takes, once; empty: the first one takes tokens."""
        return self._states.pop((stage, number), b"")

    def gradients_for(self, stage: int, number: int) -> bytes:
        """Gradients that a stage takes, once."""
        return self._gradients.pop((stage, number), b"")

    def keep_states(self, stage: int, micro_batch: MicroBatch, states: bytes) -> str:
        """Take in what a stage gave; gives why it cannot be right, or nothing."""
        bytes_most = frame_bytes_most(micro_batch.tokens, self._row_bytes)
        if not 0 < len(states) <= bytes_most:
            return f"it gave {len(states)} sealed bytes, not {bytes_most}"
        self._states[stage + 1, micro_batch.number] = states
        return ""

    def keep_gradients(self, stage: int, micro_batch: MicroBatch, states: bytes) -> str:
        """The same of gradients, of which the first stage gives none."""
        bytes_most = frame_bytes_most(micro_batch.tokens, self._gradient_row_bytes) if stage else 0
        if len(states) > bytes_most or bool(states) != bool(stage):
            return f"it gave {len(states)} sealed bytes of gradients, not {bytes_most}"
        if stage:
            self._gradients[stage - 1, micro_batch.number] = states
        return ""
