"""Updates of some experts of a mixture, as what they say of the whole model.

Theory of operation. What all share is averaged over all updates, by their weights. A tensor of an
expert is averaged over those that hold the expert, and each counts by its weight times the share of
its tokens that it sent there. Shares are of the update's own tokens, and one expert gets a
token once: so no number that a node says makes it count more than its samples do. An expert that
nobody trained stays as it is. The mean is written as one update of the whole model, which is folded
like any other.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.core.training.trust.weights import WHOLE
from coordinator.shell.aggregation.sketch import mapped_file
from hypergpu.digests import RunningDigest
from hypergpu.ids import Digest
from hypergpu.tensors.codec import sections_of
from hypergpu.tensors.layout import Flat, Float32s, Layout, Octets, TensorKind
from hypergpu.tensors.partial import PartRun, decode_range, expert_of, part_runs
from hypergpu.tensors.records import GROUP

_LONE_SHARE = np.float32(0.5)
"""As in `SenderMean`: of a sparse coordinate that one alone of several holders sent."""
_VOTES_LEAST = 0.5
"""Part of their full votes below which an expert's holders move it the less the fewer they have."""
_TOKENS_MOST = 1 << 48
"""No node routes more in a round; what says more counts as so many."""


class PartUpdate(NamedTuple):
    """An update on disk, and the part of the model that it covers."""

    path: Path
    part: Layout
    codec: str
    weight: int
    """Against the others, at least 1."""
    clip: int = WHOLE
    """What it is multiplied by besides, in 1/65,536."""
    full_weight: int = 0
    """Its weight if it had a full vote; 0: it has."""


class _OpenUpdate:
    """A mapped update."""

    def __init__(self, update: PartUpdate, layout: Layout, per_token: int) -> None:
        self.sections = sections_of(update.part, update.codec)
        self._payload = mapped_file(update.path, self.sections.integers.stop)
        self._runs = part_runs(layout, update.part)
        self.is_sparse = self.sections.large.codec.is_sparse
        self.clip = np.float32(update.clip / WHOLE)
        self._weight = update.weight
        self.vote = update.weight / (update.full_weight or update.weight)
        self._shares = token_shares(update.part, self._payload[self.sections.integers], per_token)

    def weight_of(self, expert: int | None) -> float:
        """What it counts for the tensors of an expert, or for those that all share."""
        return self._weight * (1.0 if expert is None else self._shares.get(expert, 0.0))

    def run(self, place: int, number: int) -> PartRun:
        """Where a tensor is in it."""
        return self._runs[place][number]

    def values(self, place: int, start: int, stop: int) -> Float32s:
        """Values of one of its sections."""
        return decode_range(self.sections.floats[place], self._payload, start, stop)


def token_shares(part: Layout, integers: Octets, per_token: int) -> dict[int, float]:
    """The share of its tokens that an update sent to each of its experts; 0 for those of which it
    says nothing. No share is above that of an expert that gets every token.

    Args:
        part: Layout of the update.
        integers: The update's, as bytes.
        per_token: Experts that a token is sent to.
    """
    counts: dict[int, int] = {}
    values = integers.view(np.int64)
    for tensor, start in zip(part.tensors, part.offsets, strict=True):
        expert = expert_of(tensor)
        if tensor.kind is TensorKind.INTEGER and expert is not None and tensor.count:
            counts[expert] = min(_TOKENS_MOST, max(0, int(values[start])))
    total = sum(counts.values())
    return {
        expert: min(1 / per_token, count / total) if total else 0.0
        for expert, count in counts.items()
    }


def merge_updates(
    layout: Layout, base: Path, updates: Sequence[PartUpdate], per_token: int, path: Path
) -> Digest:
    """Write the mean of updates of parts as an fp32 update of the whole; it is not synced. Blocks,
    in flat memory: it decodes each update once.

    Statistics that nobody sent, and all integers, are those of the base: counts of tokens are of a
    round.

    Args:
        layout: Of the whole model.
        base: The whole model.
        updates: In slot order; at least one.
        per_token: Experts that a token is sent to.
        path: Of the file to write.

    Raises:
        OSError: A file cannot be read or written, or has another size than its layout says.
    """
    model = Flat.view(layout, np.asarray(mapped_file(base, layout.model_bytes)))
    open_updates = [_OpenUpdate(each, layout, per_token) for each in updates]
    running_digest = RunningDigest()
    with path.open("wb") as out:
        for octets in _mean_octets(layout, model, open_updates):
            running_digest.update(octets.data)
            out.write(octets.data)
    return running_digest.digest()


def _mean_octets(
    layout: Layout, model: Flat, updates: Sequence[_OpenUpdate]
) -> Iterator[npt.NDArray[np.uint8]]:
    whole = sections_of(layout, "fp32")
    with np.errstate(all="ignore"):  # Of a useless update: the fold refuses what is not finite.
        for place, section in enumerate(whole.floats):
            before = model.statistics if section is whole.statistics else None
            for values in _means(place, layout, before, updates):
                yield values.view(np.uint8)
    yield model.integers.view(np.uint8)


def _means(
    place: int, layout: Layout, before: Float32s | None, updates: Sequence[_OpenUpdate]
) -> Iterator[Float32s]:
    """Means of a section, in order. What is missing is as before, or nothing changes of it."""
    runs = part_runs(layout, layout)[place]
    for number, run in enumerate(runs):
        senders = [
            (each, weight, part_start)
            for each in updates
            if (part_start := each.run(place, number).part_start) is not None
            and (weight := each.weight_of(run.expert)) > 0
        ]
        part = _expert_part(run, [(each, weight) for each, weight, _ in senders])
        for first in range(0, run.values_count, GROUP):
            stop = min(first + GROUP, run.values_count)
            here = slice(run.whole_start + first, run.whole_start + stop)
            old = before[here] if before is not None else np.zeros(stop - first, np.float32)
            total = np.zeros(stop - first, np.float32)
            weights, counts = np.zeros_like(total), np.zeros(total.size, np.uint32)
            for update, weight, start in senders:
                values = update.values(place, start + first, start + stop)
                is_sent = values != 0 if update.is_sparse and place == 0 else np.True_
                change = (values - old) * update.clip
                total += np.where(is_sent, change * np.float32(weight), np.float32(0))
                weights += np.where(is_sent, np.float32(weight), np.float32(0))
                counts += is_sent
            np.divide(total, weights, out=total, where=weights > 0)
            if place == 0 and len(senders) > 1 and any(each.is_sparse for each, *_ in senders):
                np.multiply(total, _LONE_SHARE, out=total, where=counts == 1)
            if part < 1:
                total *= np.float32(part)
            yield total + old


def _expert_part(run: PartRun, senders: Sequence[tuple[_OpenUpdate, float]]) -> float:
    """What part of its mean a tensor moves by: an expert's is smaller where its holders have hardly
    a vote. They are few, often one: its mean would be as long whatever its vote.
    """
    full_weight = sum(weight / each.vote for each, weight in senders)
    if run.expert is None or not full_weight:
        return 1.0
    return min(1.0, sum(weight for _, weight in senders) / (_VOTES_LEAST * full_weight))
