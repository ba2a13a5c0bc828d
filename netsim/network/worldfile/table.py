"""One table of a world file: values come out checked, and what nobody asked for is refused."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hypergpu.jobfile.problem import join_words, nearest
from hypergpu.jobfile.schema import InvalidValue, Scalar, convert_value, duration_ms, quoted_value
from netsim.error import NetsimError
from netsim.network.worldfile.places import Places

_UNITS = ("_ms", "_s", "_mbit_s", "_percent", "_mib", "_packets")


class Table:
    """Reads keys by the type that the caller wants. `finish` refuses the keys that nobody read."""

    def __init__(self, rows: Mapping[str, object], path: str, places: Places) -> None:
        self._rows = rows
        self._path = path
        self._places = places
        self._known: list[str] = []

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        return key in self._rows

    def given(self, key: str) -> object:
        """The value as TOML has it, unchecked; None when it is not given."""
        self._known.append(key)
        return self._rows.get(key)

    def refused(self, key: str, what: str, fix: str) -> NetsimError:
        """The error that names this key's place; for the caller to raise."""
        path = ".".join(word for word in (self._path, key) if word)
        return NetsimError(f"{self._places.of(path)}: {what}", fix)

    @contextmanager
    def placed(self, key: str = "") -> Iterator[None]:
        """Gives refusals from inside the place of a key, or of the table."""
        try:
            yield
        except NetsimError as refused:
            raise self.refused(key, refused.what, refused.fix) from None

    def number(self, key: str, least: float, most: float) -> float | None:
        """A number in a range; None when it is not given."""
        value = self._taken(key, float)
        if value is None:
            return None
        number = float(value)
        if not (math.isfinite(number) and least <= number <= most):
            fix = f"give a number from {least:g} to {most:.15g}"
            raise self.refused(key, f"{number:g} is out of range", fix)
        return number

    def whole(self, key: str, least: int, most: int) -> int | None:
        """A whole number in a range; None when it is not given."""
        value = self._taken(key, int)
        if value is None:
            return None
        if not least <= int(value) <= most:
            fix = f"give a whole number from {least} to {most}"
            raise self.refused(key, f"{value} is out of range", fix)
        return int(value)

    def text(self, key: str) -> str | None:
        """A text; None when it is not given."""
        value = self._taken(key, str)
        return None if value is None else str(value)

    def truth(self, key: str) -> bool | None:
        """True or false; None when it is not given."""
        value = self._taken(key, bool)
        return None if value is None else bool(value)

    def span_us(self, key: str) -> int | None:
        """A length of time such as ``"20s"``; None when it is not given."""
        self._known.append(key)
        if key not in self._rows:
            return None
        span_ms = duration_ms(self._rows[key])
        if isinstance(span_ms, InvalidValue):
            raise self.refused(key, span_ms.what, span_ms.fix)
        return span_ms * 1000

    def numbers(self, key: str) -> tuple[float, ...] | None:
        """A list of numbers; None when it is not given."""
        found = self._listed(key)
        if found is None:
            return None
        numbers = [convert_value(each, float) for each in found]
        for number in numbers:
            if isinstance(number, InvalidValue) or not math.isfinite(float(number)):
                raise self.refused(key, "not all of the list are numbers", "write, say, [1, 0.5]")
        return tuple(float(number) for number in numbers if not isinstance(number, InvalidValue))

    def words(self, key: str) -> tuple[str, ...] | None:
        """One text or a list of texts; None when it is not given."""
        if isinstance(self._rows.get(key), str):
            return (str(self.text(key)),)
        found = self._listed(key)
        if found is None:
            return None
        if not found or not all(isinstance(each, str) for each in found):
            raise self.refused(key, "not all of the list are texts", 'write, say, ["attic"]')
        return tuple(str(each) for each in found)

    def table(self, key: str) -> "Table | None":
        """A table below this one; None when it is not given."""
        self._known.append(key)
        if key not in self._rows:
            return None
        rows = self._rows[key]
        if not isinstance(rows, dict):
            raise self.refused(
                key, f"it is {quoted_value(rows)}, not a table", f"write {key} = {{ }}"
            )
        return Table(rows, f"{self._path}.{key}" if self._path else key, self._places)

    def tables(self, key: str) -> "tuple[Table, ...] | None":
        """A list of tables below this one; None when it is not given."""
        found = self._listed(key)
        if found is None:
            return None
        path = f"{self._path}.{key}" if self._path else key
        tables = []
        for number, rows in enumerate(found):
            if not isinstance(rows, dict):
                raise self.refused(
                    key, f"it holds {quoted_value(rows)}", f"write [[{key}]] before each"
                )
            tables.append(Table(rows, f"{path}.{number}", self._places))
        return tuple(tables)

    def finish(self) -> None:
        """Refuse the first key that nobody asked for."""
        for key in self._rows:
            if key not in self._known:
                raise self.refused(key, f"there is no key {key} here", self._meant(key))

    def _meant(self, key: str) -> str:
        stem = next((key.removesuffix(unit) for unit in _UNITS if key.endswith(unit)), key)
        others = [known for known in self._known if known.startswith(f"{stem}_")]
        if others:
            return f"did you mean {others[0]}? Units are part of the name"
        meant = nearest(key, self._known)
        return f"did you mean {meant}?" if meant else f"the keys are {join_words(self._known)}"

    def _taken(self, key: str, wanted: type[Scalar]) -> Scalar | None:
        self._known.append(key)
        if key not in self._rows:
            return None
        value = convert_value(self._rows[key], wanted)
        if isinstance(value, InvalidValue):
            raise self.refused(key, value.what, value.fix)
        return value

    def _listed(self, key: str) -> list[object] | None:
        self._known.append(key)
        if key not in self._rows:
            return None
        value = self._rows[key]
        if not isinstance(value, list):
            raise self.refused(key, f"it is {quoted_value(value)}, not a list", "write it in [ ]")
        return value
