"""Problems of a job's settings, each with its place and its fix, all reported at once."""

import difflib
from collections.abc import Iterable, Sequence

import msgspec

from hypergpu.errors import HyperGPUError, Reason


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


def suggestion(word: str, known: Sequence[str]) -> str:
    """The fix for a word that names nothing: the one that was probably meant, or all of them."""
    meant = nearest(word, known)
    return f'did you mean "{meant}"?' if meant else f"choose one of {join_words(known)}"


def join_words(words: Iterable[str]) -> str:
    """Join words as a sentence lists them."""
    return ", ".join(words) or "none"


def quoted_value(value: object) -> str:
    """Return a value as a sentence quotes it."""
    if isinstance(value, bool):
        return f"{str(value).lower()} (true or false)"
    if isinstance(value, str):
        return f'the text "{value}"'
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, dict):
        return "a table"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"
