"""Line numbers of a TOML text's keys, so that a problem can name its line."""

import re
from collections.abc import Iterator

_HEADER = re.compile(r"\s*\[\s*([A-Za-z0-9_.\-\" ]+?)\s*\]\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+|\"[^\"]*\")\s*(?:\.\s*([A-Za-z0-9_\-]+)\s*)?=")


class KeyLines:
    """Lines of a job file by dotted key.

    A scan by line, not a TOML parser: a key inside a multi-line text can only mislead a message's
    line number, never a value.
    """

    def __init__(self, source: str, text: str = "") -> None:
        self._source = source
        self._lines: dict[str, int] = {}
        for key, line in _keys(text):
            self._lines.setdefault(key, line)

    def of(self, key: str) -> str:
        """Return ``FILE:LINE [table]`` of a dotted key, as exactly as it is known."""
        line = self.line(key)
        place = f"{self._source}:{line}" if line else self._source
        return f"{place} {self._key_name(key)}" if key else place

    def line(self, key: str) -> int:
        """Return the line of a key, or of its table; 0 when neither is there."""
        table, _, _ = key.rpartition(".")
        return self._lines.get(key) or self._lines.get(table) or 0

    @staticmethod
    def _key_name(key: str) -> str:
        table, _, name = key.rpartition(".")
        return f"[{table}] {name}" if table else name


def _keys(text: str) -> Iterator[tuple[str, int]]:
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            table = header[1].replace('"', "")
            yield table, number
        elif found := _KEY.match(line):
            words = [table, found[1].strip('"'), found[2] or ""]
            yield ".".join(word for word in words if word), number
