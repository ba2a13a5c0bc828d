"""Changes of a JSON tree: recorded while a draft is edited, applied by every reader of the feed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

JsonObject = dict[str, Any]
Change = list[Any]
"""``["set", path, value]``, ``["append", path, items, keep]`` or ``["drop", path]``."""
_MISSING = object()


class Draft:
    """A JSON tree with the list of changes since the list was last taken.

    Values are copied when they enter the tree, so that no recorded change alters later.
    """

    def __init__(self, tree: JsonObject | None = None) -> None:
        self.tree: JsonObject = tree if tree is not None else {}
        self._changes: list[Change] = []

    def get(self, *path: str) -> Any:
        """Value at a path; None when nothing is there."""
        value = _find(self.tree, path)
        return None if value is _MISSING else value

    def set(self, path: Sequence[str], value: Any) -> None:
        """Set a value unless it is there already."""
        if not _is_same(_find(self.tree, path), value):
            self._record(["set", list(path), json_copy(value)])

    def set_each(self, path: Sequence[str], values: Mapping[str, Any]) -> None:
        """Set the members of an object that differ; others stay."""
        for name, value in values.items():
            self.set((*path, name), value)

    def append(self, path: Sequence[str], items: Iterable[Any], *, keep: int) -> None:
        """Append to a list, of which the last ``keep`` items stay."""
        new_items = [json_copy(item) for item in items]
        if new_items:
            self._record(["append", list(path), new_items, keep])

    def drop(self, path: Sequence[str]) -> None:
        """Remove a value if it is there."""
        if _find(self.tree, path) is not _MISSING:
            self._record(["drop", list(path)])

    def take_changes(self) -> list[Change]:
        """Changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _record(self, change: Change) -> None:
        apply_change(self.tree, change)
        self._changes.append(change)


def apply_changes(tree: JsonObject, changes: Iterable[Change]) -> None:
    """Apply the changes of one delta to a tree, in order."""
    for change in changes:
        apply_change(tree, change)


def apply_change(tree: JsonObject, change: Change) -> None:
    """Apply one change; objects that are missing on the way to a value are created.

    Raises:
        ValueError: The change is of no known kind.
    """
    kind, path = change[0], change[1]
    if kind == "drop":
        parent = _find(tree, path[:-1])
        if isinstance(parent, dict):
            parent.pop(path[-1], None)
        return
    parent = _made_parent(tree, path)
    if kind == "set":
        parent[path[-1]] = json_copy(change[2])
    elif kind == "append":
        kept_items = [*(parent.get(path[-1]) or ()), *json_copy(change[2])]
        parent[path[-1]] = kept_items[-change[3] :]
    else:
        raise ValueError(f"a change of the unknown kind {kind!r}")


def conflated_changes(changes: Sequence[Change]) -> list[Change]:
    """Leave out changes whose outcome a later ``set`` of the same value or of its parent replaces.

    Cost is O(changes * depth).
    """
    replaced_paths: set[tuple[str, ...]] = set()
    kept_changes: list[Change] = []
    for change in reversed(changes):
        path = tuple(change[1])
        if any(path[:depth] in replaced_paths for depth in range(1, len(path) + 1)):
            continue
        if change[0] == "set":
            replaced_paths.add(path)
        kept_changes.append(change)
    kept_changes.reverse()
    return kept_changes


def json_copy(value: Any) -> Any:
    """A copy of JSON that shares no list or object with the original."""
    if isinstance(value, dict):
        return {key: json_copy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_copy(each) for each in value]
    return value


def _is_same(one: Any, other: Any) -> bool:
    # True equals 1 in Python and not in JSON.
    return type(one) is type(other) and bool(one == other)


def _find(tree: JsonObject, path: Sequence[str]) -> Any:
    value: Any = tree
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _made_parent(tree: JsonObject, path: Sequence[str]) -> JsonObject:
    parent = tree
    for key in path[:-1]:
        below = parent.get(key)
        if not isinstance(below, dict):
            below = parent[key] = {}
        parent = below
    return parent
