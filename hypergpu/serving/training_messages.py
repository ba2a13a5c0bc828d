"""What stages of a ring that trains are told, and what they answer. Activations and gradients are
sealed by one stage for the one beside it, as hidden states of answers are: see
`hypergpu.rings.frame_cipher`.

Messages that are larger than one may be are cut into pieces (`TrainingPiece`), whose sum is bounded
before they are joined.
"""

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.rings.frame_cipher import MicroBatchPlace
from hypergpu.units import Bytes

PIECE_BYTES_MOST = Bytes(900 << 10)
"""Content of a piece at most."""
WHOLE_BYTES_MOST = Bytes(256 << 20)
"""Size of a message in pieces at most."""
ROWS_MOST = 4_096
"""Rows of a micro-batch at most."""


class TrainForward(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute a micro-batch; the last stage computes its gradients, too."""

    micro_batch: int
    lengths: tuple[int, ...]
    """Tokens of each row."""
    tokens: tuple[int, ...] = ()
    """To the first stage."""
    states: bytes = b""
    """To the others: activations of all rows, as the ring's codec writes them; sealed on the way.
    """
    labels: tuple[int, ...] = ()
    """To the last stage: what each token is, where it counts."""
    weight: float = 0.0
    """To the last stage: one over the tokens that count in the step."""
    ends_step: bool = False
    """Whether it is the last micro-batch of a step: sums of squares are wanted."""
    step: int = 0
    """The step that it belongs to, from 0 on; of rows that are held out, steps before them."""
    is_evaluation: bool = False
    """Whether its rows are held out: their loss alone is wanted."""

    @property
    def forward_place(self) -> MicroBatchPlace:
        """Where its activations belong: those that it takes, and those that it gives."""
        return MicroBatchPlace(
            self.step,
            self.micro_batch,
            is_backward=False,
            is_evaluation=self.is_evaluation,
        )

    @property
    def backward_place(self) -> MicroBatchPlace:
        """The same of its gradients, which the last stage gives at once."""
        return MicroBatchPlace(self.step, self.micro_batch, is_backward=True)

    @property
    def rows(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)

    def check(self) -> None:
        """Check what does not follow from types.

        Raises:
            HyperGPUError: REQUEST_INVALID, with what is wrong.
        """
        faults = (
            (not 0 < len(self.lengths) <= ROWS_MOST, f"1 to {ROWS_MOST} rows"),
            (any(each < 2 for each in self.lengths), "two tokens a row at least"),
            (bool(self.tokens) == bool(self.states), "either tokens or states"),
            (bool(self.tokens) and len(self.tokens) != self.rows, "a token for each place"),
            (bool(self.labels) and len(self.labels) != self.rows, "a label for each place"),
            (self.step < 0, "a step from 0 on"),
            (any(each < 0 for each in self.tokens), "no negative tokens"),
        )
        for is_wrong, rule in faults:
            if is_wrong:
                raise HyperGPUError(Reason.REQUEST_INVALID, f"a micro-batch has {rule}")


class TrainBackward(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Compute the gradients of a micro-batch from those of the stage behind."""

    micro_batch: int
    states: bytes
    """Gradients of what the stage gave, as the gradients' codec writes them; sealed on the way."""
    ends_step: bool = False
    step: int = 0

    @property
    def backward_place(self) -> MicroBatchPlace:
        """Where its gradients belong: those that it takes, and those that it gives."""
        return MicroBatchPlace(self.step, self.micro_batch, is_backward=True)


class StepAdapter(msgspec.Struct, frozen=True, tag=True):
    """Step the stage's part of the adapter by the gradients of all micro-batches."""

    rate: float
    scale: float
    """What gradients are multiplied by."""


class KeepAdapter(msgspec.Struct, frozen=True, tag=True):
    """Keep the adapter and its optimizer's state as they are; those of the newest two are kept."""

    step: int


class GiveAdapter(msgspec.Struct, frozen=True, tag=True):
    """Give what was kept of a layer."""

    step: int
    layer: int


class TakeAdapter(msgspec.Struct, frozen=True, tag=True):
    """Keep this as the adapter of a layer after a number of steps."""

    step: int
    layer: int
    content: bytes


class UseAdapter(msgspec.Struct, frozen=True, tag=True):
    """Go on from what was kept after a number of steps; after none, from the seed's adapter."""

    step: int


class TrainingPiece(msgspec.Struct, frozen=True, tag=True):
    """A part of a message that is too large for one; the pieces of one come in order."""

    content: bytes
    is_last: bool


TrainingRequest = (
    TrainForward
    | TrainBackward
    | StepAdapter
    | KeepAdapter
    | GiveAdapter
    | TakeAdapter
    | UseAdapter
    | TrainingPiece
)


class Activations(msgspec.Struct, frozen=True, tag=True):
    """What a stage gives of a micro-batch, sealed for the stage behind."""

    states: bytes


class Gradients(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Gradients of what the stage took."""

    states: bytes = b""
    """Sealed for the stage before; empty of the first one."""
    loss: float = 0.0
    """Sum over tokens that count, of the last stage."""
    squares: float = 0.0
    """Sum of squares of the stage's gradient, at the end of a step."""


class LossSum(msgspec.Struct, frozen=True, tag=True):
    """Loss of rows that are held out, of the last stage."""

    loss: float
    """Sum over tokens that count."""


class AdapterKept(msgspec.Struct, frozen=True, tag=True):
    """The adapter of a layer as it was kept; empty: it is kept no more, or not that one."""

    content: bytes = b""


class AdapterReady(msgspec.Struct, frozen=True, tag=True):
    """What was asked of the adapter is done, or cannot be: it is not kept here."""

    is_there: bool = True


TrainingReply = Activations | Gradients | LossSum | AdapterKept | AdapterReady | TrainingPiece


class PieceJoiner:
    """Joins the pieces of messages, one message after another.

    Args:
        bytes_most: Size of a message at most.
    """

    def __init__(self, bytes_most: int = WHOLE_BYTES_MOST) -> None:
        self._content = bytearray()
        self._bytes_most = bytes_most

    @property
    def size_bytes(self) -> int:
        """What has come of a message that is not whole."""
        return len(self._content)

    def add(self, piece: TrainingPiece) -> bytes | None:
        """Take a piece; gives the message once it is whole.

        Raises:
            HyperGPUError: REQUEST_INVALID, the message is too large.
        """
        if len(self._content) + len(piece.content) > self._bytes_most:
            self._content.clear()
            detail = f"a message of a ring has more than {self._bytes_most:,} bytes"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        self._content += piece.content
        if not piece.is_last:
            return None
        content = bytes(self._content)
        self._content.clear()
        return content


def pieces_of(body: bytes) -> list[TrainingPiece]:
    """A message in pieces."""
    starts = range(0, len(body), PIECE_BYTES_MOST)
    return [
        TrainingPiece(body[start : start + PIECE_BYTES_MOST], start + PIECE_BYTES_MOST >= len(body))
        for start in starts
    ]
