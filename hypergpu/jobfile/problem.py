"""Problems of a job's settings, each with its place and its fix, all reported at once."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from hypergpu.errors import HyperGPUError, Reason

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


class Problem(msgspec.Struct, frozen=True):
    """One problem of a job's settings."""

    key: str
    """Dotted, for example ``inner.learning_rate``; empty for the file as a whole."""
    what: str
    fix: str
    where: str = ""
    """The file, its line and the table; empty when the settings came from no file."""

    def __str__(self) -> str:
        return f"{self.where or self.key}: {self.what}. Fix: {self.fix}"


class JobFileError(HyperGPUError):
    """Settings that no job can have. ``problems`` holds all of them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(Reason.SPEC_INVALID, "; ".join(str(problem) for problem in self.problems))


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the known word that was probably meant, or an empty string."""
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return close[0] if close else ""


def join_words(words: Iterable[str]) -> str:
    """Join words as a sentence lists them."""
    return ", ".join(words) or "none"
