"""Changes of a running job: short names, text values, and the rules that a job file obeys."""

import json
from collections.abc import Iterable, Mapping

import msgspec

from hypergpu.jobfile.problem import JobFileError, Problem, join_words, nearest
from hypergpu.jobfile.reading import read_spec
from hypergpu.jobfile.rules import spec_problems
from hypergpu.jobfile.schema import ALIASES, DURATIONS, KEYS, Scalar
from hypergpu.jobfile.spec import SETTABLE, JobSpec
from hypergpu.jobfile.toml import KeyLines

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
    tree = msgspec.to_builtins(spec)
    changed: set[str] = set()
    for word, text in changes.items():
        key = ALIASES.get(word, word)
        target = DURATIONS.get(key, key)
        if target not in SETTABLE:
            problems.append(_not_settable(key))
            continue
        if target in changed:
            problems.append(Problem(key, "it is given twice", "keep one"))
        changed.add(target)
        try:
            value = _value.decode(text)
        except (msgspec.MsgspecError, UnicodeError):
            what = f"{text[:80]!r} is not the JSON of a value"
            problems.append(Problem(key, what, "send one value as JSON"))
            continue
        table, _, name = key.partition(".")
        tree[table].pop(target.partition(".")[2], None)
        tree[table][name] = value
    result, wrong = read_spec(tree, KeyLines(""))
    problems += [msgspec.structs.replace(each, where="") for each in wrong]
    known = {each.key for each in problems}
    problems += [each for each in spec_problems(result) if each.key not in known]
    if problems:
        raise JobFileError(problems)
    return result


def _not_settable(key: str) -> Problem:
    if key in KEYS or key in JobSpec.__struct_fields__:
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
