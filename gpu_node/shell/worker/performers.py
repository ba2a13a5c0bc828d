"""The table of what a worker does beside training: one performer for each further kind of work."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from gpu_node.shell.worker.protocol import DoWork, WorkerCapabilities
from hypergpu.blobs import BlobRef
from hypergpu.farm.map_request import work_kind
from hypergpu.farm.written_texts import GENERATE_VERSION
from hypergpu.packed_work import PackedWork
from hypergpu.rings.stage_work import STAGE_KIND
from hypergpu.serving.serve_request import (
    EMBED_KIND,
    ENGINE_KIND,
    ENGINE_VERSION,
    GGUF_KIND,
    STAGE_VERSION,
    TUNED_KIND,
)

if TYPE_CHECKING:
    from gpu_node.shell.worker.trainer import ShardCallbacks


_TORCH = "torch"


class WorkOutput(NamedTuple):
    """What a performer gives for one piece of work."""

    result: PackedWork
    blob: BlobRef | None = None
    """Blob that the result names, written to its `DoWork.output_path`, not synced."""


Perform = Callable[[DoWork, "ShardCallbacks"], WorkOutput]
"""Does one piece of work and gives its result. It raises `ShardError` where the work cannot be done
here, and calls ``raise_if_aborted`` between its parts. Work that takes long also reports progress,
with a loss of 0: a worker that is silent for too long is taken to hang. Work that answers calls
takes them by ``next_call`` and answers by ``send_output`` until it is aborted.
"""


class Performer(NamedTuple):
    """What does work of one kind in the worker."""

    kind: str
    version: int
    """Only jobs of the same version give this node work."""
    load: Callable[[], Perform]
    """Imports what the work needs, once the owner's caps are set."""
    needs: tuple[str, ...] = ()
    """Modules without which the kind is not offered."""

    def is_possible(self, capabilities: WorkerCapabilities) -> bool:
        """Whether a worker can do such work: modules are installed, and a torch is tried."""
        if _TORCH in self.needs and not capabilities.torch:
            return False
        return all(importlib.util.find_spec(name) is not None for name in self.needs)


class Performers:
    """Performers by the kinds of their work."""

    def __init__(self, *performers: Performer) -> None:
        self._performers = {each.kind: each for each in performers}
        self._loaded: dict[str, Perform] = {}

    def with_performer(self, performer: Performer) -> "Performers":
        """The table with one more performer."""
        return Performers(*self._performers.values(), performer)

    def added_to(self, capabilities: WorkerCapabilities) -> WorkerCapabilities:
        """A worker's capabilities with the kinds of work that it can do."""
        versions = {
            kind: each.version
            for kind, each in self._performers.items()
            if each.is_possible(capabilities)
        }
        return replace(
            capabilities,
            workloads={**capabilities.workloads, **versions},
            work_kinds=tuple(versions),
        )

    def perform(self, request: DoWork, callbacks: "ShardCallbacks") -> WorkOutput:
        """Do one piece of work.

        Raises:
            ShardError: It cannot be done here.
            ShardAbortedError: It is not needed any more.
        """
        from gpu_node.shell.worker.trainer import ShardError

        kind = request.work.kind
        if kind not in self._performers:
            raise ShardError(f"this worker does no work of kind {kind}")
        if kind not in self._loaded:
            self._loaded[kind] = self._performers[kind].load()
        return self._loaded[kind](request, callbacks)


def _performer_in(module: str) -> Callable[[], Perform]:
    """Loads the function ``perform`` of a module by its name: nothing of it is imported before."""

    def load() -> Perform:
        perform: Perform = importlib.import_module(module).perform
        return perform

    return load


def _item_performer(name: str, *needs: str) -> Performer:
    """The performer of an item kind, in the file of its name."""
    module = f"gpu_node.shell.worker.farm.{name}"
    return Performer(work_kind(name), 1, _performer_in(module), needs)


_TRANSFORMERS = (_TORCH, "transformers", "tokenizers")
PERFORMERS = Performers(
    _item_performer("checksum"),
    _item_performer("embed", *_TRANSFORMERS, "sentence_transformers"),
    _item_performer("score", *_TRANSFORMERS),
    Performer(
        work_kind("generate"),
        GENERATE_VERSION,
        _performer_in("gpu_node.shell.worker.writing.generate"),
        (*_TRANSFORMERS, "jinja2"),
    ),
    _item_performer("classify", *_TRANSFORMERS),
    _item_performer("program", _TORCH, "pyarrow"),
    Performer(
        ENGINE_KIND,
        ENGINE_VERSION,
        _performer_in("gpu_node.shell.worker.serving.transformers_engine"),
        (*_TRANSFORMERS, "jinja2"),
    ),
    Performer(
        STAGE_KIND,
        STAGE_VERSION,
        _performer_in("gpu_node.shell.worker.serving.stage_engine"),
        (*_TRANSFORMERS, "jinja2", "accelerate"),
    ),
    Performer(
        GGUF_KIND,
        ENGINE_VERSION,
        _performer_in("gpu_node.shell.worker.serving.gguf_engine"),
        (_TORCH, "xllamacpp", "jinja2"),
    ),
    Performer(
        EMBED_KIND,
        ENGINE_VERSION,
        _performer_in("gpu_node.shell.worker.serving.embed_engine"),
        (*_TRANSFORMERS, "sentence_transformers"),
    ),
    Performer(
        TUNED_KIND,
        ENGINE_VERSION,
        _performer_in("gpu_node.shell.worker.serving.tuned_engine"),
        (*_TRANSFORMERS, "peft", "jinja2"),
    ),
    _item_performer("image", *_TRANSFORMERS, "diffusers"),
    _item_performer("sweep", _TORCH),
)
"""A kind is added by an entry here. Training is not among them: `Trainers` has messages of its own,
as models and end states lie on disk.
"""
