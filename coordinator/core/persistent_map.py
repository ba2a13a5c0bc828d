"""An immutable mapping of which a changed copy costs the square root of its size.

A job of ten thousand nodes replaces one member and one participant for each update that comes in;
copies of whole dictionaries were two thirds of what an update cost there. The maps of libraries
(immutables, pyrsistent) do not keep a dictionary's order, which a replay must.
"""

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_SMALL = 128
"""Copying a dictionary of this size costs no more than the layers."""


class PersistentMap(Mapping[_Key, _Value]):
    """A base that copies share, and the changes since. It iterates in a dictionary's order.

    Args:
        base: Nobody may change it any more.
        changes: The newer entries, few.
    """

    __slots__ = ("_base", "_changes", "_counts")

    def __init__(self, base: dict[_Key, _Value], changes: dict[_Key, _Value]) -> None:
        self._base = base
        self._changes = changes
        self._counts: dict[Callable[[_Value], bool], int] = {}
        """Counts over the base, which copies share."""

    def __getitem__(self, key: _Key) -> _Value:
        changes = self._changes
        return changes[key] if key in changes else self._base[key]

    def __contains__(self, key: object) -> bool:
        return key in self._changes or key in self._base

    def __len__(self) -> int:
        base = self._base
        return len(base) + sum(key not in base for key in self._changes)

    def __iter__(self) -> Iterator[_Key]:
        return iter(self.to_dict())

    def __repr__(self) -> str:
        return repr(self.to_dict())

    def items(self) -> ItemsView[_Key, _Value]:
        """Entries, as a dictionary would have them."""
        return self.to_dict().items()

    def values(self) -> ValuesView[_Value]:
        """Values, as a dictionary would have them."""
        return self.to_dict().values()

    def to_dict(self) -> dict[_Key, _Value]:
        """Return a dictionary of the same entries in the same order. The caller may change it."""
        return {**self._base, **self._changes}

    def replace_items(self, changes: Mapping[_Key, _Value]) -> "PersistentMap[_Key, _Value]":
        """Return a copy with these entries in place of the earlier ones."""
        copy = PersistentMap(self._base, {**self._changes, **changes})
        copy._counts = self._counts
        return copy._merge() if len(copy._changes) ** 2 > len(self._base) else copy

    def _merge(self) -> "PersistentMap[_Key, _Value]":
        merged_map = PersistentMap(self.to_dict(), {})
        merged_map._counts = {claim: self.count(claim) for claim in self._counts}
        return merged_map

    def count(self, claim: Callable[[_Value], bool]) -> int:
        """Count the values of which the claim holds. A claim is asked once of each unchanged value.

        Args:
            claim: A function that lives on, not a new one for each call.
        """
        base = self._base
        if claim not in self._counts:
            self._counts[claim] = sum(map(claim, base.values()))
        change_count = sum(
            claim(value) - (claim(base[key]) if key in base else 0)
            for key, value in self._changes.items()
        )
        return self._counts[claim] + change_count


def replace_items(
    entries: Mapping[_Key, _Value], changes: Mapping[_Key, _Value]
) -> Mapping[_Key, _Value]:
    """Return the entries with some replaced: a dictionary while they are few."""
    if isinstance(entries, PersistentMap):
        return entries.replace_items(changes)
    copy = {**entries, **changes}
    return copy if len(copy) <= _SMALL else PersistentMap(copy, {})


def count_where(entries: Mapping[_Key, _Value], claim: Callable[[_Value], bool]) -> int:
    """Count the values of which the claim, a function that lives on, holds."""
    if isinstance(entries, PersistentMap):
        return entries.count(claim)
    return sum(map(claim, entries.values()))
