"""Answering a shard without training it, as cheaply as bytes can be made.

Nothing is kept between rounds and nothing is synced to disk: there is no work to lose.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from gpu_node.shell.worker.messages import Train, Trained
from gpu_node.shell.worker.shard.watch import ShardError, Watch
from hypergpu.digest import digest_of
from hypergpu.tensors.codec import encode_update, sections_of
from hypergpu.tensors.compression import RECORD
from hypergpu.tensors.layout import Flat, Float32s, Layout, Octets
from hypergpu.units import Bytes, Milliseconds, Samples

_TILE = 1 << 18


def answer_null(request: Train, layout: Layout, watch: Watch) -> Trained:
    """Write an update of the right size whose first values depend on the seed.

    Raises:
        ShardError: The layout is not the job's.
        ShardAbortedError: Nothing was written.
    """
    watch.refuse_aborted()
    if layout.digest != request.layout_digest:
        raise ShardError("options.parameters is not the job's: the layouts differ")
    payload = _pattern(layout, request.codec)
    sections = sections_of(layout, request.codec)
    section = sections.large if sections.large.values_count else sections.small
    values = _noise(min(RECORD, section.values_count), request.seed)
    section.scheme.encode(values, payload[section.bytes_of(0, values.size)])
    Path(request.update_path).parent.mkdir(parents=True, exist_ok=True)
    payload.tofile(request.update_path)
    return Trained(
        lease=request.lease,
        update_digest=digest_of(payload.data),
        update_bytes=Bytes(payload.size),
        inner_steps=request.inner_steps,
        samples=Samples(sum(run.count for run in request.ranges)),
        compute_ms=Milliseconds(0),
        loss_first=0.0,
        loss_last=0.0,
    )


def _noise(count: int, seed: int) -> Float32s:
    bits = np.random.Philox(key=seed & (2**64 - 1)).random_raw(count)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-34) - np.float32(2**-11)


@lru_cache(maxsize=1)
def _pattern(layout: Layout, codec: str) -> Octets:
    """An encoded pseudo-gradient of repeated noise, made once: later rounds rewrite its start."""
    flat = Flat.empty(layout)
    flat.parameters[:] = np.resize(_noise(_TILE, 0), layout.parameters_count)
    return encode_update(layout, codec, flat).payload


class Played:
    """The beginning of a round that is not trained: its steps only pass.

    Args:
        request: As `beginning.granted` has it.
        step: Lets the time of one step pass.
    """

    def __init__(self, request: Train, step: Callable[[], None]) -> None:
        self.request = request
        self._step = step
        self.steps_taken = 0

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to pass."""
        return self.steps_taken == self.request.inner_steps

    def advance(self) -> None:
        """Let one step pass."""
        self._step()
        self.steps_taken += 1
