"""TOML text into a job spec, and changes of a running job's spec: the rules of a job file hold
for both.
"""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.keys import ALIASES, DURATIONS, KEYS, SETTABLE, Scalar
from hypergpu.jobfile.limits import CHOICES
from hypergpu.jobfile.rules import FIXED, checked_spec, spec_problems, unused_aware, usual_optimizer
from hypergpu.jobfile.spec import DEFAULT_STRATEGY, PLANNED, SPARSE_CODECS, JobSpec
from hypergpu.jobfile.toml import (
    DurationError,
    JobFileError,
    KeyLines,
    Problem,
    convert_struct,
    duration_ms,
    join_words,
    nearest,
    quoted_value,
)
from hypergpu.jobfile.toml_text import TEXT_LENGTH_MOST, load_toml


def read_job_file(path: Path) -> JobSpec:
    """Read and validate a job file.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read.
        JobFileError: It describes no job; all problems at once.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(4 * TEXT_LENGTH_MOST + 1)
    except OSError as error:
        detail = f"the job file {path} cannot be read: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    if len(raw) > 4 * TEXT_LENGTH_MOST:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path} is too large for a job file")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = Problem("", f"byte {error.start} is not UTF-8", "save it as UTF-8", str(path))
        raise JobFileError([problem]) from error
    return parse_job(text, source=str(path))


def check_data_folder(spec: JobSpec, file: Path) -> None:
    """Require that a job's data folder exists.

    Raises:
        JobFileError: There is no such folder.
    """
    if not spec.data.path:
        return
    folder = data_folder(spec, file.parent)
    if not folder.is_dir():
        key = "data.path"
        fix = "correct it; a relative one begins at the job file's folder"
        where = KeyLines(str(file), file.read_text("utf-8")).of(key)
        raise JobFileError([Problem(key, f"there is no folder {folder}", fix, where)])


def data_folder(spec: JobSpec, beside: Path) -> Path:
    """Return the data folder of a job file that lies in the folder ``beside``."""
    return (beside / Path(spec.data.path).expanduser()).resolve()


def parse_job(text: str, *, source: str = "job file", data_path: str = "") -> JobSpec:
    """Validate the text of a job file; ``source`` names it in messages.

    Args:
        data_path: Folder with the data, in place of what the file says.

    Raises:
        JobFileError: It describes no job; all problems at once.
    """
    return parse_job_table(load_toml(text, source), KeyLines(source, text), data_path=data_path)


def parse_job_table(tree: Mapping[str, object], lines: KeyLines, *, data_path: str = "") -> JobSpec:
    """Validate the parsed table of a job, which may be a part of another file.

    Args:
        data_path: Folder with the data, in place of what the table says.

    Raises:
        JobFileError: It describes no job; all problems at once.
    """
    strategy = str(tree.get("strategy", DEFAULT_STRATEGY))
    with_defaults = copy.deepcopy({"workload": "", "strategy": strategy, **tree})
    for key, value in FIXED.get(strategy, {}).items():
        table, _, name = key.partition(".")
        rows = with_defaults.setdefault(table, {})
        if isinstance(rows, dict) and not _durations_of(key) & rows.keys():
            rows.setdefault(name, value)
    if strategy == "aware":
        _set_plan_defaults(with_defaults)
    _set_optimizer_default(with_defaults)
    if data_path and isinstance(data_table := with_defaults.setdefault("data", {}), dict):
        data_table["path"] = data_path
    spec, problems = read_spec(with_defaults, lines)
    problem_keys = {problem.key for problem in problems}
    # Of a table with a wrong element of a list no spec is left to judge.
    is_read = bool(spec.workload) or not with_defaults["workload"]
    further_problems = [
        *_unused_problems(tree, strategy),
        *(spec_problems(spec) if is_read else ()),
    ]
    for problem in further_problems:
        if problem.key not in problem_keys:
            problems.append(msgspec.structs.replace(problem, where=lines.of(problem.key)))
    if problems:
        raise JobFileError(sorted(problems, key=lambda each: lines.line(each.key)))
    return spec


def read_spec(tree: Mapping[str, Any], lines: KeyLines) -> tuple[JobSpec, list[Problem]]:
    """Convert a table into a spec without the keys that are wrong, and return their problems.

    ``tree`` has a workload.
    """
    rest = copy.deepcopy(dict(tree))
    problems = []
    for name, target in DURATIONS.items():
        table, _, key = name.partition(".")
        rows = _table_of(rest, table)
        if key not in rows:
            continue
        value, bare = rows.pop(key), target.partition(".")[2]
        if bare in rows:
            what, fix = f"{bare} is given too", "keep one of the two"
            problems.append(Problem(name, what, fix, lines.of(name)))
            continue
        try:
            rows[bare] = duration_ms(value)
        except DurationError as wrong:
            problems.append(Problem(name, wrong.what, wrong.fix, lines.of(name)))
    options = _table_of(rest, "options")
    for name, value in list(options.items()):
        if not isinstance(value, str | int | float | bool):
            what = f"it is {quoted_value(value)}; options are text, numbers or true/false"
            key = f"options.{name}"
            problems.append(Problem(key, what, "give one value", lines.of(key)))
            del options[name]
    spec, others = convert_struct(rest, JobSpec, lines)
    return spec or JobSpec(""), problems + others


def _set_plan_defaults(tree: dict[str, Any]) -> None:
    """Add to a job's table which keys its plans take as stated. Rounds that overlap are dense."""
    rows = tree.setdefault("aware", {})
    if not isinstance(rows, dict):
        return
    stated_keys = [
        key for key in PLANNED if key.partition(".")[2] in _table_of(tree, key.partition(".")[0])
    ]
    rows.setdefault("stated_keys", stated_keys)
    if _table_of(tree, "round").get("overlap") == "eager":
        rows.setdefault("sparsest", "int4")


def _set_optimizer_default(tree: dict[str, Any]) -> None:
    """Add the workload's own optimizer to a job's table that names none.

    Not where every node has samples of another kind, for which nothing but AdamW was measured, and
    not beside a momentum, which a file states for SGD.
    """
    rows, split = tree.setdefault("inner", {}), _table_of(tree, "data")
    is_common = split.get("sharding", "iid") == "iid" and split.get("source", "shared") == "shared"
    if not isinstance(rows, dict) or "momentum" in rows or not is_common:
        return
    rows.setdefault("optimizer", usual_optimizer(str(tree["workload"])))


def _durations_of(key: str) -> set[str]:
    """Names in the same table that set a millisecond key too."""
    return {name.partition(".")[2] for name, target in DURATIONS.items() if target == key}


def _table_of(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tree.get(name)
    return table if isinstance(table, dict) else {}


def parse_spec_json(text: str) -> JobSpec:
    """Validate a spec that came over the wire.

    Raises:
        JobFileError: It is not a spec, or describes no job.
    """
    try:
        spec = msgspec.json.decode(text, type=JobSpec)
    except msgspec.DecodeError as error:
        fix = "send what hypergpu job submit sends; upgrade the older side"
        raise JobFileError([Problem("spec", str(error), fix)]) from error
    return checked_spec(spec)


def spec_json(spec: JobSpec) -> str:
    """Return the canonical JSON of a spec: equal specs have equal texts."""
    return msgspec.json.encode(spec, order="sorted").decode("utf-8")


def _unused_problems(tree: Mapping[str, Any], strategy: str) -> Iterator[Problem]:
    """Settings that do nothing beside others. Defaults would hide them from the spec's own rules:
    only the file tells what was written.
    """
    if _table_of(tree, "data").get("sharding", "iid") == "iid":
        for name in _table_of(tree, "data").keys() & {"alpha", "partitions"}:
            what = f'{name} does nothing when sharding is "iid"'
            yield Problem(f"data.{name}", what, f'set sharding = "dirichlet" or remove {name}')
    if (up := _table_of(tree, "codec").get("up")) in SPARSE_CODECS:
        for name in _table_of(tree, "outer"):
            what = f"the sparse codec {up} takes plain outer steps: {name} does nothing"
            yield Problem(f"outer.{name}", what, f"remove {name}, or use a dense codec")
    if strategy != "aware" and "aware" in tree:
        yield unused_aware(strategy)


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
    changed_keys: set[str] = set()
    for word, text in changes.items():
        key = ALIASES.get(word, word)
        target = DURATIONS.get(key, key)
        if target not in SETTABLE:
            problems.append(_not_settable(key))
            continue
        if target in changed_keys:
            problems.append(Problem(key, "it is given twice", "keep one"))
        changed_keys.add(target)
        try:
            value = text if text in CHOICES.get(target, ()) else _value.decode(text)
        except (msgspec.MsgspecError, UnicodeError):
            what = f"{text[:80]!r} is not the JSON of a value"
            problems.append(Problem(key, what, "send one value as JSON"))
            continue
        table, _, name = key.partition(".")
        tree[table].pop(target.partition(".")[2], None)
        tree[table][name] = value
    result, wrong = read_spec(tree, KeyLines(""))
    problems += [msgspec.structs.replace(each, where="") for each in wrong]
    known_keys = {each.key for each in problems}
    problems += [each for each in spec_problems(result) if each.key not in known_keys]
    if problems:
        raise JobFileError(problems)
    return result


def _not_settable(key: str) -> Problem:
    if key in KEYS or key in JobSpec.__struct_fields__:
        what = "it is fixed once the job exists"
        return Problem(key, what, f"submit a new job; a running one takes {join_words(SETTABLE)}")
    nearest_key = nearest(key, (*SETTABLE, *ALIASES, *DURATIONS))
    fix = (
        f"did you mean {nearest_key}?"
        if nearest_key
        else f"a running job takes {join_words(SETTABLE)}"
    )
    return Problem(key, "there is no such parameter", fix)


def _as_json(value: str) -> str:
    try:
        _value.decode(value)
    except (msgspec.MsgspecError, UnicodeError):
        return json.dumps(value)
    return value
