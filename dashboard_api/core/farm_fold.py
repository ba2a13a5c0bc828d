"""Journalled events and levels of farm jobs into changes of the feed's state."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dashboard_api.core.changes import Draft, JsonObject
from dashboard_api.core.state import FarmNodeState, FarmState
from hypergpu.journal.farm_events import (
    BundleAcceptedEvent,
    BundleHandedBackEvent,
    ItemDroppedEvent,
    MapCreatedEvent,
    ResultDoubtedEvent,
)
from hypergpu.journal.public_event import PublicEvent
from hypergpu.user.client.bundle_progress import BundlesView

TILES_MOST = 240
_NEWEST_WEIGHT = 0.3
"""Weight of the newest bundle in a node's speed: about the last five count."""
_RATE_DIGITS = 3


class FarmMemory(msgspec.Struct):
    """The newest accepted bundle: outvoted results of it are told right after it."""

    bundle: int = -1
    start: int = 0


class FarmFold:
    """A farm job's part of the state, edited by its events.

    Args:
        draft: The state.
        path: Where the job is in it.
        memory: What the feed does not show.
    """

    def __init__(self, draft: Draft, path: tuple[str, ...], memory: FarmMemory) -> None:
        self._draft = draft
        self._job = path
        self._path = (*path, "farm")
        self._memory = memory

    def take_event(self, event: PublicEvent, at_ms: int) -> None:
        """Fold an event; those of other kinds of jobs change nothing."""
        if fold := _FOLDS.get(type(event)):
            fold(self, event, at_ms)

    def take_levels(self, bundles: BundlesView) -> None:
        """Fold the newest summary."""
        if self._draft.get(*self._path) is None:
            self._begin(bundles.item_kind, bundles.items, bundles.unit)
        names = ("settled_items", "failed_items", "units", "open_bundles")
        values: JsonObject = {name: getattr(bundles, name) for name in names}
        values["credited_units"] = bundles.paid_units
        values["open_runs"] = [msgspec.to_builtins(run) for run in bundles.open_runs]
        self._draft.set_each(self._path, values)

    def _begin(self, item_kind: str, items: int, unit: str) -> None:
        tile_items = max(1, -(-items // TILES_MOST))
        state = FarmState(item_kind=item_kind, items=items, unit=unit, tile_items=tile_items)
        self._draft.set(self._path, msgspec.to_builtins(state))

    def take_creation(self, event: MapCreatedEvent, at_ms: int) -> None:
        """See `MapCreatedEvent`."""
        self._draft.set_each(self._job, {"created_at_ms": at_ms, "workload": event.item_kind})
        if self._draft.get(*self._path) is None:
            self._begin(event.item_kind, event.items, event.unit)

    def take_acceptance(self, event: BundleAcceptedEvent, at_ms: int) -> None:
        """See `BundleAcceptedEvent`."""
        self._memory.bundle, self._memory.start = event.bundle, event.start
        self._settle(event.start, event.items)
        before = self._node(event.node)
        counts = {"bundles": 1, "items": event.items, "units": event.units}
        counts["failures"] = event.failures
        values: JsonObject = {name: before[name] + count for name, count in counts.items()}
        if before["at_ms"] and at_ms > before["at_ms"]:
            newest = 1000 * event.items / (at_ms - before["at_ms"])
            mean = before["items_per_s"]
            speed = newest if mean is None else mean + _NEWEST_WEIGHT * (newest - mean)
            values["items_per_s"] = float(f"{speed:.{_RATE_DIGITS}g}")
        self._draft.set((*self._path, "nodes", event.node), {**before, **values, "at_ms": at_ms})

    def take_hand_back(self, event: BundleHandedBackEvent, _at_ms: int) -> None:
        """See `BundleHandedBackEvent`."""
        self._count(event.node, "handed_back")

    def take_doubt(self, event: ResultDoubtedEvent, _at_ms: int) -> None:
        """See `ResultDoubtedEvent`."""
        self._count(event.node, "doubts")
        if event.bundle == self._memory.bundle:
            self._add("doubted_by_tile", self._tile(self._memory.start), 1)

    def take_drop(self, event: ItemDroppedEvent, _at_ms: int) -> None:
        """See `ItemDroppedEvent`."""
        self._settle(event.item, 1)

    def _settle(self, start: int, items: int) -> None:
        """Count items of a run as settled, in each tile that it touches."""
        tile_items, end = self._tile_items, start + items
        for tile in range(self._tile(start), self._tile(end - 1) + 1):
            first, last = max(start, tile * tile_items), min(end, (tile + 1) * tile_items)
            self._add("settled_by_tile", tile, last - first)

    @property
    def _tile_items(self) -> int:
        return int(self._draft.get(*self._path, "tile_items") or 1)

    def _tile(self, item: int) -> int:
        return item // self._tile_items

    def _add(self, name: str, tile: int, count: int) -> None:
        path = (*self._path, name, str(tile))
        self._draft.set(path, int(self._draft.get(*path) or 0) + count)

    def _node(self, node: str) -> JsonObject:
        state: JsonObject | None = self._draft.get(*self._path, "nodes", node)
        return state or msgspec.to_builtins(FarmNodeState())

    def _count(self, node: str, name: str) -> None:
        before = self._node(node)
        self._draft.set((*self._path, "nodes", node), {**before, name: before[name] + 1})


_FOLDS: Mapping[type[PublicEvent], Callable[[FarmFold, Any, int], None]] = {
    MapCreatedEvent: FarmFold.take_creation,
    BundleAcceptedEvent: FarmFold.take_acceptance,
    BundleHandedBackEvent: FarmFold.take_hand_back,
    ResultDoubtedEvent: FarmFold.take_doubt,
    ItemDroppedEvent: FarmFold.take_drop,
}
