"""Shards of the null workload, which only lets time pass."""

import time
from functools import lru_cache
from pathlib import Path

import numpy as np

from gpu_node.core.events import TrainedUpdate
from gpu_node.shell.worker.prefetch import PrefetchWork, next_prefetch
from gpu_node.shell.worker.protocol import TrainShard
from gpu_node.shell.worker.slowed_trainer import StepFloor
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.assignment import Task
from hypergpu.digests import digest_of
from hypergpu.tensors.codec import sections_of
from hypergpu.tensors.layout import Float32s, Layout, Octets
from hypergpu.tensors.records import RECORD
from hypergpu.units import Bytes, Milliseconds

_TILE = 1 << 18


class NullPrefetch:
    """A prefetch that lets the time of its steps pass."""

    def __init__(self, work: PrefetchWork, floor: StepFloor) -> None:
        self.work = work
        self._floor = floor
        self.steps_taken = 0

    @property
    def is_done(self) -> bool:
        """Whether no step is left to take."""
        return self.steps_taken == self.work.task.inner_steps

    def advance(self) -> None:
        """Let the time of one step pass."""
        time.sleep(_step_s(self._floor, self.work.task))
        self.steps_taken += 1


class NullShards:
    """Answers the shards of a job without training. Used like `TrainedShards`."""

    def __init__(self, layout: Layout, floor: StepFloor) -> None:
        self.layout = layout
        self._floor = floor

    def train(
        self, request: TrainShard, callbacks: ShardCallbacks, early: NullPrefetch | None
    ) -> TrainedUpdate:
        """See `TrainedShards`."""
        task, started_s = request.task, time.monotonic()
        taken_steps = 0 if early is None else early.steps_taken
        if self._floor.floor_s:
            for _ in range(task.inner_steps - taken_steps):
                callbacks.raise_if_aborted()
                time.sleep(_step_s(self._floor, task))
        compute_s = time.monotonic() - started_s + taken_steps * _step_s(self._floor, task)
        callbacks.raise_if_aborted()
        if self.layout.digest != task.layout:
            raise ShardError("options.parameters is not the job's: the layouts differ")
        payload = _payload(self.layout, task)
        Path(request.update_path).parent.mkdir(parents=True, exist_ok=True)
        payload.tofile(request.update_path)
        return TrainedUpdate(
            digest=digest_of(payload.data),
            size_bytes=Bytes(payload.size),
            inner_steps=task.inner_steps,
            samples=task.samples,
            compute_ms=Milliseconds(round(compute_s * 1000)),
            loss_first=0.0,
            loss_last=0.0,
        )

    def begin_prefetch(self, request: TrainShard) -> NullPrefetch | None:
        """See `TrainedShards`."""
        work = next_prefetch(request)
        if work is None or not self._floor.floor_s:
            return None
        return NullPrefetch(work, self._floor)


def _step_s(floor: StepFloor, task: Task) -> float:
    return floor.step_s * task.batch_size / task.usual_batch_size


def _payload(layout: Layout, task: Task) -> Octets:
    """An update of the right size whose first values depend on the seed."""
    payload = _pattern(layout, task.codec)
    sections = sections_of(layout, task.codec)
    section = sections.large if sections.large.values_count else sections.small
    values = _noise(min(RECORD, section.values_count), task.seed)
    section.codec.encode(values, payload[section.bytes_of(0, values.size)])
    return payload


def _noise(count: int, seed: int) -> Float32s:
    bits = np.random.Philox(key=seed & (2**64 - 1)).random_raw(count)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-34) - np.float32(2**-11)


@lru_cache(maxsize=1)
def _pattern(layout: Layout, codec: str) -> Octets:
    """An encoded pseudo-gradient of repeated noise, made once: later rounds rewrite its start.

    One tile is encoded, and its bytes repeated: the values would take eight times as many.
    """
    sections, tile = sections_of(layout, codec), _noise(_TILE, 0)
    payload = np.empty(sections.integers.stop, np.uint8)
    for section in (sections.large, sections.small):
        encoded_tile = np.empty(section.codec.encoded_bytes(_TILE), np.uint8)
        section.codec.encode(tile, encoded_tile)
        octets, tiles = payload[section.bytes], section.values_count // _TILE
        octets[: tiles * encoded_tile.size].reshape(tiles, encoded_tile.size)[:] = encoded_tile
        section.codec.encode(
            tile[: section.values_count % _TILE], octets[tiles * encoded_tile.size :]
        )
    return payload
