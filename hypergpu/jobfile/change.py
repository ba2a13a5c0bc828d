"""Changes of a running job: short names, text values, and the rules that a job file obeys."""

import json
from collections.abc import Iterable, Mapping

import msgspec

from hypergpu.jobfile.problem import JobFileError, Problem, join_words, nearest
from hypergpu.jobfile.rules import spec_problems
from hypergpu.jobfile.schema import (
    ALIASES,
    DURATIONS,
    KEYS,
    InvalidValue,
    Scalar,
    convert_value,
    duration_ms,
)
from hypergpu.jobfile.spec import SETTABLE, JobSpec

_value: msgspec.json.Decoder[Scalar] = msgspec.json.Decoder(Scalar)
"""Decoder that rejects nested values."""


def parameter_words(words: Iterable[str]) -> dict[str, str]:
    """Parse ``["lr=0.001", "deadline=60s"]`` into dotted keys with values as JSON.

    Raises:
        JobFileError: A word is not KEY=VALUE, or a key is given twice.
    """
    changes: dict[str, str] = {}
    problems: list[Problem] = []
    for word in words:
        key, equals, value = word.partition("=")
        name = ALIASES.get(key.strip(), key.strip())
        if not (equals and name and value.strip()):
            problems.append(Problem(word, "it is not KEY=VALUE", "write, for example, lr=0.001"))
        elif name in changes:
            problems.append(Problem(name, "it is given twice", "keep one"))
        else:
            changes[name] = _as_json(value.strip())
    if problems:
        raise JobFileError(problems)
    return changes


def with_parameters(spec: JobSpec, changes: Mapping[str, str]) -> JobSpec:
    """Return the spec after a user's changes, checked like a job file.

    Args:
        spec: The job's present settings.
        changes: Dotted keys or aliases (``lr``) to values as JSON, as ``SetParameters`` has them.

    Raises:
        JobFileError: A key cannot change, a value is wrong, or the result describes no job; all
            problems at once.
    """
    problems: list[Problem] = []
    changed: dict[str, dict[str, Scalar]] = {}
    for word, text in changes.items():
        taken = _parse_change(ALIASES.get(word, word), text)
        if isinstance(taken, Problem):
            problems.append(taken)
            continue
        key, value = taken
        table, _, name = key.partition(".")
        if name in changed.setdefault(table, {}):
            problems.append(Problem(key, "it is given twice", "keep one"))
        changed[table][name] = value
    result = spec
    for table, values in changed.items():
        section = msgspec.structs.replace(getattr(result, table), **values)
        result = msgspec.structs.replace(result, **{table: section})
    problems.extend(spec_problems(result))
    if problems:
        raise JobFileError(problems)
    return result


def _parse_change(key: str, text: str) -> tuple[str, Scalar] | Problem:
    target = DURATIONS.get(key, key)
    if target not in SETTABLE:
        return _not_settable(key)
    try:
        value = _value.decode(text)
    except (msgspec.MsgspecError, UnicodeError):
        return Problem(key, f"{text[:80]!r} is not the JSON of a value", "send one value as JSON")
    table, _, name = target.partition(".")
    taken = duration_ms(value) if key in DURATIONS else convert_value(value, KEYS[table][name])
    if isinstance(taken, InvalidValue):
        return Problem(key, taken.what, taken.fix)
    return target, taken


def _not_settable(key: str) -> Problem:
    table, _, name = key.rpartition(".")
    if name in KEYS.get(table, {}):
        what = "it is fixed once the job exists"
        return Problem(key, what, f"submit a new job; a running one takes {join_words(SETTABLE)}")
    meant = nearest(key, (*SETTABLE, *ALIASES, *DURATIONS))
    fix = f"did you mean {meant}?" if meant else f"a running job takes {join_words(SETTABLE)}"
    return Problem(key, "there is no such parameter", fix)


def _as_json(value: str) -> str:
    try:
        _value.decode(value)
    except (msgspec.MsgspecError, UnicodeError):
        return json.dumps(value)
    return value
