"""What a fold has to do besides where nodes hold some experts of a mixture only: their updates
become one of the whole model before it, and the parts that they hold are made after it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from coordinator.core.training.experts import expert_windows
from coordinator.core.training.job.chain import extend_chain
from coordinator.core.training.job.commands import Aggregate, FoldedUpdate
from coordinator.core.training.job.state import Model, ModelPart
from coordinator.shell.aggregation.fold_files import work_path
from coordinator.shell.aggregation.fold_request import FoldedFile, StoredUpdate
from coordinator.shell.aggregation.model_parts import next_part, whole_part
from coordinator.shell.aggregation.part_updates import PartUpdate, merge_updates
from coordinator.shell.kinds.training.weighing import stored_base
from coordinator.shell.store.blobs.store import BlobStore
from hypergpu.assignment import Delta
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of_file
from hypergpu.experts import Mixture
from hypergpu.ids import NodeId
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import Layout
from hypergpu.tensors.partial import part_layout


class MadeParts(NamedTuple):
    """Parts of a model, and the files that they are; the caller adopts or deletes these."""

    parts: tuple[ModelPart, ...]
    files: tuple[FoldedFile, ...]


NO_PARTS = MadeParts((), ())
UsableUpdate = tuple[FoldedUpdate, StoredUpdate]


def sound_updates(
    layout: Layout, usable: Sequence[UsableUpdate]
) -> tuple[list[UsableUpdate], list[tuple[NodeId, str]]]:
    """Updates that have their digests, and the senders of the others, with the reason. Blocks."""
    sound: list[UsableUpdate] = []
    damaged_updates: list[tuple[NodeId, str]] = []
    for update, stored_update in usable:
        expected_bytes = update_bytes(part_layout(layout, update.experts), update.codec)
        try:
            size = stored_update.path.stat().st_size
            why = "" if size == expected_bytes else f"it has {size} bytes, not {expected_bytes}"
            if not why and digest_of_file(stored_update.path) != stored_update.digest:
                why = "its bytes are not what its digest says"
        except OSError as error:
            why = str(error)
        if why:
            damaged_updates.append((update.node, why))
        else:
            sound.append((update, stored_update))
    return sound, damaged_updates


@contextmanager
def merged_update(
    layout: Layout, command: Aggregate, base: Path, usable: Sequence[UsableUpdate]
) -> Iterator[tuple[StoredUpdate, ...]]:
    """The mean of updates of some experts as one update of the whole; none where there are none.
    Blocks.

    Raises:
        OSError: The disk fails.
    """
    counted_updates = [
        (update, stored_update) for update, stored_update in usable if update.weight and update.clip
    ]
    if not counted_updates or command.mixture is None:
        yield ()
        return
    updates = [
        PartUpdate(
            stored_update.path,
            part_layout(layout, update.experts),
            update.codec,
            update.weight,
            update.clip,
            update.full_weight,
        )
        for update, stored_update in counted_updates
    ]
    path = work_path(base.parent)
    try:
        digest = merge_updates(layout, base, updates, command.mixture.per_token, path)
        yield (StoredUpdate(path, digest, 1, "fp32"),)
    finally:
        path.unlink(missing_ok=True)


def first_parts(mixture: Mixture, model: Path, layout: Layout) -> MadeParts:
    """The parts of a job's first model; none where nodes hold the whole. Blocks.

    Raises:
        OSError: The disk fails.
    """
    parts: list[ModelPart] = []
    files: list[FoldedFile] = []
    for experts in expert_windows(mixture):
        part = part_layout(layout, experts)
        file = whole_part(model, layout, part, work_path(model.parent))
        files.append(file)
        parts.append(ModelPart(experts, part.digest, BlobRef(file.digest, file.size_bytes)))
    return MadeParts(tuple(parts), tuple(files))


def next_parts(
    command: Aggregate, model: FoldedFile, layout: Layout, blobs: BlobStore
) -> MadeParts:
    """The parts of the next model, with the changes that lead to them. Blocks.

    Raises:
        BaseDamagedError: A part of the base is missing.
        OSError: The disk fails.
    """
    parts: list[ModelPart] = []
    files: list[FoldedFile] = []
    for base in command.base.held_parts:
        held_layout = part_layout(layout, base.experts)
        part_files = next_part(
            model.path,
            stored_base(blobs, base.blob).path,
            (layout, held_layout),
            command.down,
            lambda: work_path(model.path.parent),
        )
        files.append(part_files.model)
        deltas: tuple[Delta, ...] = ()
        if part_files.delta is not None:
            files.append(part_files.delta)
            blob = BlobRef(part_files.delta.digest, part_files.delta.size_bytes)
            chain = Model(command.base.round, base.blob, None, base.deltas)
            delta = Delta(base.blob.digest, blob, command.down)
            deltas = extend_chain(chain, delta, part_files.model.size_bytes)
        blob = BlobRef(part_files.model.digest, part_files.model.size_bytes)
        parts.append(ModelPart(base.experts, base.layout, blob, deltas))
    return MadeParts(tuple(parts), tuple(files))
