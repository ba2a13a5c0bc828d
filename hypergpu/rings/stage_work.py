"""A node's part of a ring as its work, and how a model is cut, as its user states it."""

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_training import RingTraining
from hypergpu.tensors.hidden_states import STATE_CODECS
from hypergpu.units import Bytes

STAGE_KIND = "serve/stage"
"""Kind of a node's work, as nodes name it among their workloads."""
MEMORY_SHARE = 0.7
"""Part of a node's memory that layers may take: the rest is for keys, and for computing."""
LIBRARY_BYTES = 1_100 << 20
"""Memory that a worker's libraries take before it holds a model: torch, transformers and peft have
1,032 MB of data (VmData on Linux), which an owner's limit counts.
"""
LAYERS_MOST = 512
STAGES_MOST = 64
EMBED_BLOB, HEAD_BLOB = "embed", "head"
"""Names of the files of a model's two ends."""


def layer_blob(layer: int) -> str:
    """Name of a layer's file."""
    return f"layer-{layer:03}"


def span_blobs(span: LayerSpan, layers: int) -> tuple[str, ...]:
    """Files that the holder of a span needs, in the order in which they are written.

    Args:
        span: Its layers.
        layers: Of the whole model.
    """
    first = (EMBED_BLOB,) if span.first == 0 else ()
    last = (HEAD_BLOB,) if span.end == layers else ()
    return (*first, *map(layer_blob, range(span.first, span.end)), *last)


class ModelCut(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is served in stages."""

    layers: int
    hidden_size: int
    layer_bytes: int
    """Memory of the largest layer, as it is held."""
    end_bytes: int
    """Memory of the larger of embedding and head."""
    token_bytes: int = 0
    """Keys and values of a token in one layer; 0: not known."""
    stages: int
    """Nodes that hold it, each some of its layers."""
    codec: str = "float32"
    """How hidden states travel, one of `STATE_CODECS`."""
    has_standby: bool = True
    """Whether one node more, if it is free, holds a stage ready for one that is lost."""

    @property
    def nodes_most(self) -> int:
        """Nodes that it uses at a time."""
        return self.stages + self.has_standby

    def faults(self) -> tuple[tuple[bool, str, str], ...]:
        """Fields with whether each is right, and the rule."""
        return (
            (0 < self.layers <= LAYERS_MOST, "cut.layers", f"1 to {LAYERS_MOST}"),
            (0 < self.hidden_size <= 1 << 16, "cut.hidden_size", f"1 to {1 << 16}"),
            (
                min(self.layer_bytes, self.end_bytes, self.token_bytes) >= 0,
                "cut",
                "no negative sizes",
            ),
            (
                0 < self.stages <= min(self.layers, STAGES_MOST),
                "cut.stages",
                f"1 to {STAGES_MOST}, and no more than there are layers",
            ),
            (self.codec in STATE_CODECS, "cut.codec", f"one of {', '.join(STATE_CODECS)}"),
        )


class CutSizes(msgspec.Struct, frozen=True):
    """Sizes of a model that is to be cut."""

    kind: str
    """Its architecture, as transformers names it."""
    layers: int
    hidden_size: int
    layer_bytes: int
    """Memory of the largest layer."""
    end_bytes: int
    """Memory of the larger of embedding and head."""
    total_bytes: int
    token_bytes: int
    """Keys and values of a token in one layer."""

    def cut(self, stages: int, codec: str) -> ModelCut:
        """The cut into so many stages."""
        return ModelCut(
            layers=self.layers,
            hidden_size=self.hidden_size,
            layer_bytes=self.layer_bytes,
            end_bytes=self.end_bytes,
            token_bytes=self.token_bytes,
            stages=stages,
            codec=codec,
        )


class LayerSpeed(msgspec.Struct, frozen=True):
    """How fast a machine computes layers of a model, one conversation at a time."""

    device: str
    memory_bytes: int
    """What models may have of the device's."""
    layer_us: float
    """Time of one token in one layer."""
    end_us: float
    """Time of one token in the head."""
    read_us: float
    """Time of a token of a prompt in one layer."""

    def token_us(self, layers: int) -> float:
        """Time of one token in so many layers and the head."""
        return layers * self.layer_us + self.end_us


def memory_for_models(device: str, memory_bytes: int) -> Bytes:
    """What models may have of a node's memory: on a CPU the worker's libraries lie in the same.

    Args:
        device: Its kind.
        memory_bytes: The device's; 0: not known, and taken to be enough.
    """
    if device != "cpu" or not memory_bytes:
        return Bytes(memory_bytes)
    return Bytes(max(1, memory_bytes - LIBRARY_BYTES))


def layers_in(sizes: ModelCut | CutSizes, memory_bytes: Bytes) -> int:
    """Layers that a node's memory holds, with one end of the model.

    Args:
        sizes: Of the model.
        memory_bytes: What models may have of the node's; 0: not known, and taken to be enough.
    """
    if not memory_bytes:
        return sizes.layers
    room_bytes = int(MEMORY_SHARE * memory_bytes) - sizes.end_bytes
    return min(sizes.layers, max(0, room_bytes // max(1, sizes.layer_bytes)))


class StageWork(msgspec.Struct, frozen=True, kw_only=True):
    """A node's work: hold some layers, and compute passes until the lease is void."""

    model: str
    """Name of the model, for people."""
    files: dict[str, BlobRef]
    """Those of its layers, with the index of the folder's other files."""
    span: LayerSpan
    cut: ModelCut
    dtype: str = "float32"
    context_most: int = 0
    """Tokens of a prompt and its answer at most; 0: as many as the model takes."""
    training: RingTraining | None = None
    """The adapter that the ring trains before it answers; None: none."""

    @property
    def inputs(self) -> tuple[BlobRef, ...]:
        """All blobs that the work needs, each once."""
        return tuple({blob.digest: blob for blob in self.files.values()}.values())
