"""Where each key of a world file stands, so that a problem can name its line."""

import re
from collections import Counter
from collections.abc import Iterator

_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\-]+)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"\s*([A-Za-z0-9_\-]+)\s*(?:\.\s*([A-Za-z0-9_\-]+)\s*)?=")


class Places:
    """Lines by path: ``nodes.2.rtt_ms`` is the key of the third ``[[nodes]]``.

    A scan by line, not a TOML parser: it can only mislead a message's line number, never a value.
    """

    def __init__(self, source: str, text: str = "") -> None:
        self._source = source
        self._lines: dict[str, int] = {}
        for path, line in _paths(text):
            self._lines.setdefault(path, line)

    def of(self, path: str) -> str:
        """``FILE:LINE key`` of a path, or of the nearest thing around it that has a line."""
        around = path
        while around and around not in self._lines:
            around = around.rpartition(".")[0]
        place = f"{self._source}:{self._lines[around]}" if around else self._source
        return f"{place} {_spoken(path)}" if path else place


def _spoken(path: str) -> str:
    return re.sub(r"\.(\d+)", lambda found: f"[{int(found[1]) + 1}]", path)


def _paths(text: str) -> Iterator[tuple[str, int]]:
    counts: Counter[str] = Counter()
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.fullmatch(line):
            table = _numbered(header[2], counts)
            if header[1] == "[[":
                table = f"{table}.{counts[table]}"
                counts[table.rpartition(".")[0]] += 1
            yield table, number
        elif found := _KEY.match(line):
            yield ".".join(word for word in (table, found[1], found[2]) if word), number


def _numbered(name: str, counts: Counter[str]) -> str:
    """The path of a header: below an array it belongs to the array's newest table."""
    path = ""
    words = name.split(".")
    for depth, word in enumerate(words, start=1):
        path = f"{path}.{word}" if path else word
        if depth < len(words) and counts[path]:
            path = f"{path}.{counts[path] - 1}"
    return path
