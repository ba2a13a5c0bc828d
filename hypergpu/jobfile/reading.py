"""Parsing of TOML text into a job spec; all problems are collected before they are raised."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.problem import JobFileError, Problem, join_words, nearest
from hypergpu.jobfile.rules import checked_spec, spec_problems
from hypergpu.jobfile.schema import (
    DURATIONS,
    KEYS,
    NICKNAMES,
    OPTIONS,
    SECTIONS,
    TOP,
    InvalidValue,
    Scalar,
    convert_value,
    dotted_key,
    duration_ms,
    quoted_value,
    tables_with,
)
from hypergpu.jobfile.spec import SPARSE_SCHEMES, JobSpec
from hypergpu.jobfile.strategies import FIXED, PLANNED, unused_aware
from hypergpu.jobfile.toml import KeyLines, load_toml

FILE_BYTES_MAX = 1 << 20


def read_job_file(path: Path) -> JobSpec:
    """Read and validate a job file.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read.
        JobFileError: It describes no job; all problems at once.
    """
    try:
        raw = path.read_bytes()
    except OSError as broken:
        detail = f"the job file {path} cannot be read: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    if len(raw) > FILE_BYTES_MAX:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{path} is too large for a job file")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as broken:
        problem = Problem("", f"byte {broken.start} is not UTF-8", "save it as UTF-8", str(path))
        raise JobFileError([problem]) from broken
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


def parse_job(text: str, *, source: str = "job file") -> JobSpec:
    """Validate the text of a job file; ``source`` names it in messages.

    Raises:
        JobFileError: It describes no job; all problems at once.
    """
    return parse_job_table(load_toml(text, source), KeyLines(source, text))


def parse_job_table(tree: Mapping[str, object], lines: KeyLines) -> JobSpec:
    """Validate the parsed table of a job, which may be a part of another file.

    Raises:
        JobFileError: It describes no job; all problems at once.
    """
    return _Reader(lines).spec(tree)


def parse_spec_json(text: str) -> JobSpec:
    """Validate a spec that came over the wire.

    Raises:
        JobFileError: It is not a spec, or describes no job.
    """
    try:
        spec = msgspec.json.decode(text, type=JobSpec)
    except msgspec.DecodeError as broken:
        fix = "send what hypergpu job submit sends; upgrade the older side"
        raise JobFileError([Problem("spec", str(broken), fix)]) from broken
    return checked_spec(spec)


def spec_json(spec: JobSpec) -> str:
    """Return the canonical JSON of a spec: equal specs have equal texts."""
    return msgspec.json.encode(spec, order="sorted").decode("utf-8")


class _Reader:
    """Turns one TOML tree into a spec and collects its problems."""

    def __init__(self, lines: KeyLines) -> None:
        self._lines = lines
        self._problems: list[Problem] = []
        self._given: dict[str, dict[str, Scalar]] = {table: {} for table in KEYS}
        self._options: dict[str, Scalar] = {}
        self._has_aware = False

    def spec(self, tree: Mapping[str, object]) -> JobSpec:
        """Build the spec, or raise all its problems."""
        self._has_aware = "aware" in tree
        for key, value in tree.items():
            if isinstance(value, dict):
                self._take_table(key, value)
            elif key in SECTIONS or key == OPTIONS:
                self._complain(key, f"it is {quoted_value(value)}, not a table", f"write [{key}]")
            else:
                self._take(TOP, key, value)
        if "workload" not in tree:
            fix = 'add workload = "digits-cnn" on top; hypergpu env lists the workloads'
            self._complain("workload", "it is missing", fix)
        self._check_pairs()
        spec = self._build_spec()
        known = {problem.key for problem in self._problems}
        for problem in spec_problems(spec):
            if problem.key not in known:
                self._complain(problem.key, problem.what, problem.fix)
        if self._problems:
            raise JobFileError(sorted(self._problems, key=lambda each: self._lines.line(each.key)))
        return spec

    def _complain(self, key: str, what: str, fix: str) -> None:
        self._problems.append(Problem(key, what, fix, self._lines.of(key)))

    def _take_table(self, table: str, rows: Mapping[str, object]) -> None:
        if table == OPTIONS:
            self._take_options(rows)
        elif table in SECTIONS:
            for key, value in rows.items():
                self._take(table, key, value)
        else:
            known = (*SECTIONS, OPTIONS)
            meant = nearest(table, known)
            fix = f"did you mean [{meant}]?" if meant else f"the tables are {join_words(known)}"
            self._complain(table, "there is no such table", fix)

    def _take_options(self, rows: Mapping[str, object]) -> None:
        for key, value in rows.items():
            if isinstance(value, str | int | float | bool):
                self._options[key] = value
            else:
                what = f"it is {quoted_value(value)}; options are text, numbers or true/false"
                self._complain(dotted_key(OPTIONS, key), what, "give one value")

    def _take(self, table: str, key: str, value: object) -> None:
        name = dotted_key(table, key)
        if name in DURATIONS:
            self._take_duration(name, value)
        elif (wanted := KEYS[table].get(key)) is None:
            self._complain(name, "there is no such key", _unknown_key_fix(table, key))
        elif isinstance(taken := convert_value(value, wanted), InvalidValue):
            self._complain(name, taken.what, taken.fix)
        elif key in self._given[table]:
            self._complain(name, "it is given with a unit too", "keep one of the two")
        else:
            self._given[table][key] = taken

    def _take_duration(self, name: str, value: object) -> None:
        span_ms = duration_ms(value)
        table, _, key = DURATIONS[name].partition(".")
        if isinstance(span_ms, InvalidValue):
            self._complain(name, span_ms.what, span_ms.fix)
        elif key in self._given[table]:
            self._complain(name, f"{key} is given too", "keep one of the two")
        else:
            self._given[table][key] = span_ms

    def _check_pairs(self) -> None:
        # The defaults hide these from the spec's own rules: only the file tells what was written.
        sharding = self._given["data"].get("sharding", "iid")
        if sharding == "iid":
            for key in ("alpha", "partitions"):
                if key in self._given["data"]:
                    what = f'{key} does nothing when sharding is "iid"'
                    fix = f'set sharding = "dirichlet" or remove {key}'
                    self._complain(f"data.{key}", what, fix)
        strategy = str(self._given[TOP].get("strategy", "diloco"))
        self._check_strategy(strategy)
        has_deadline = strategy == "aware" or self._given["round"].get("deadline_ms")
        if "quorum" in self._given["round"] and not has_deadline:
            has_bad_deadline = any(found.key.startswith("round.dead") for found in self._problems)
            if not has_bad_deadline:
                what = "quorum does nothing without a deadline"
                fix = 'add deadline = "60s" or remove quorum'
                is_fixed = "round.deadline_ms" in FIXED.get(strategy, {})
                self._complain("round.quorum", what, "remove quorum" if is_fixed else fix)

        if (up := self._given["codec"].get("up")) in SPARSE_SCHEMES:
            for key in self._given["outer"]:
                what = f"the sparse codec {up} takes plain outer steps: {key} does nothing"
                self._complain(f"outer.{key}", what, f"remove {key}, or use a dense codec")

    def _check_strategy(self, strategy: str) -> None:
        if strategy != "aware":
            if self._has_aware:
                problem = unused_aware(strategy)
                self._complain(problem.key, problem.what, problem.fix)
            return
        for key in PLANNED:
            table, _, name = key.partition(".")
            if name in self._given[table]:
                is_codec = table == "codec"
                what = f'{name} does nothing with strategy "aware", which plans it for each node'
                hint = "; the lightest codec allowed is sparsest in [aware]" if is_codec else ""
                self._complain(key, what, f"remove {name}{hint}")

    def _build_spec(self) -> JobSpec:
        strategy = str(self._given[TOP].get("strategy", "diloco"))
        for key, value in FIXED.get(strategy, {}).items():
            table, _, name = key.partition(".")
            self._given[table].setdefault(name, value)
        top = {"workload": "", **self._given[TOP]}
        sections = {name: struct(**self._given[name]) for name, struct in SECTIONS.items()}
        return msgspec.convert(
            {**top, OPTIONS: self._options, **msgspec.to_builtins(sections)}, JobSpec
        )


def _unknown_key_fix(table: str, key: str) -> str:
    durations = [name.partition(".")[2] for name in DURATIONS if name.startswith(f"{table}.")]
    known = [*KEYS[table], *durations]
    nickname = NICKNAMES.get(key.lower(), key)
    if nickname in known:
        return f"did you mean {nickname}?"
    homes = [home for home in tables_with(nickname) if home != table]
    if homes:
        named = " or ".join(f"[{home}]" if home else "the top" for home in homes)
        return f"{nickname} belongs to {named}"
    if meant := nearest(key, known):
        return f"did you mean {meant}?"
    place = f"[{table}]" if table else "the top of the file"
    return f"the keys of {place} are {join_words(known)}"
