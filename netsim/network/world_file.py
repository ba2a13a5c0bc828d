"""World files: TOML into a world. The first error is reported with its line, key and fix."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from hypergpu.jobfile.reading import parse_job, parse_job_table
from hypergpu.jobfile.spec import JobSpec
from hypergpu.jobfile.toml import (
    JobFileError,
    KeyLines,
    join_words,
    nearest,
    read_struct,
)
from hypergpu.jobfile.toml_text import load_toml
from hypergpu.units import Bytes, Microseconds, Milliseconds
from netsim.link import (
    COORDINATOR_LINK,
    TRACE_BYTES_MAX,
    LinkCourse,
    LinkTrace,
    NetsimError,
    PairDelay,
    Shape,
    csv_trace,
    mahimahi_trace,
)
from netsim.network.pairs import PAIRS_MAX
from netsim.network.profiles import (
    NODES_MAX,
    LinkKeys,
    NodeKeys,
    PairKeys,
    WorldKeys,
    profile,
    replace_durations,
)
from netsim.network.world import (
    COORDINATOR,
    Churn,
    FaultEntry,
    HealEntry,
    NodeDescription,
    SlowDeviceFault,
    WorldDescription,
    WorldFault,
    churn_class,
)

FILE_BYTES_MAX = 1 << 20
_EVERYBODY = "all"
_NO_CHURN, _PROFILE_CHURN = "none", "profile"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_OF_COORDINATOR = ("heal", "crash", "slow_disk", "clock_jump")

ReadFile = Callable[[str], bytes]
"""Reads a file beside the world file; raises a `NetsimError` when it cannot."""


def read_world_file(path: Path) -> WorldDescription:
    """Read a world file, and the job and traces that it names, relative to its own folder.

    Raises:
        NetsimError: It describes no world.
    """
    raw = _read(path, FILE_BYTES_MAX)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NetsimError(f"{path}: byte {error.start} is not UTF-8", "save it so") from None
    return parse_world(
        text,
        source=str(path),
        name=path.stem,
        read_file=lambda name: _read(path.parent / name, TRACE_BYTES_MAX),
    )


def _no_files(name: str) -> bytes:
    raise NetsimError(f"there is no file {name} beside a text", "read the world from a file")


def parse_world(
    text: str, *, source: str, name: str = "world", read_file: ReadFile = _no_files
) -> WorldDescription:
    """Read the world that a text describes.

    Args:
        text: TOML.
        source: Names the text in messages.
        name: The world's, unless the text gives one.
        read_file: How to get the job and the traces that the text names.

    Raises:
        NetsimError: It describes no world.
    """
    lines = KeyLines(source, text)
    try:
        tree = replace_durations(load_toml(text, source), lines)
        keys = read_struct(tree, WorldKeys, lines)
    except JobFileError as wrong:
        problem = wrong.problems[0]
        raise NetsimError(f"{problem.where}: {problem.what}", problem.fix) from None
    return _WorldReader(keys, lines, read_file).world(name)


class _WorldReader:
    """Checks what single keys cannot say, and puts the world together."""

    def __init__(self, keys: WorldKeys, lines: KeyLines, read_file: ReadFile) -> None:
        self._keys = keys
        self._lines = lines
        self._read_file = read_file

    def world(self, name: str) -> WorldDescription:
        keys = self._keys
        if not keys.nodes:
            raise self._error("nodes", "no nodes", 'add [[nodes]] with profile = "home-fibre"')
        with self._at_key("churn"):
            _churn_of(keys.churn, "")
        with self._at_key("coordinator"):
            coordinator = (keys.coordinator or LinkKeys()).link(COORDINATOR_LINK)
        groups = [self._group(number, each) for number, each in enumerate(keys.nodes)]
        self._check_names(groups)
        targets = _targets(groups)
        faults = tuple(self._faults(targets))
        nodes = tuple(node for group in groups for node in group)
        self._check_devices(nodes, faults)
        return WorldDescription(
            name=keys.name or name,
            seed=keys.seed,
            starts_at_hour=keys.hour,
            job=self._job(),
            coordinator=coordinator,
            nodes=nodes,
            faults=faults,
            churn_speed=keys.churn_speed,
            pairs=self._pairs(targets),
        )

    def _error(self, key: str, what: str, fix: str) -> NetsimError:
        return NetsimError(f"{self._lines.of(key)}: {what}", fix)

    @contextmanager
    def _at_key(self, key: str) -> Iterator[None]:
        """Add the place of a key to the errors of the block."""
        try:
            yield
        except JobFileError as wrong:
            problem = wrong.problems[0]
            place = problem.where or self._lines.of(key)
            raise NetsimError(f"{place}: {problem.what}", problem.fix) from None
        except NetsimError as wrong:
            raise self._error(key, wrong.detail, wrong.fix) from None

    def _job(self) -> JobSpec | None:
        job_keys = self._keys.job
        with self._at_key("job"):
            if isinstance(job_keys, str):
                text = self._read_file(job_keys).decode("utf-8", "replace")
                return parse_job(text, source=job_keys)
            return None if job_keys is None else parse_job_table(job_keys, self._lines.below("job"))

    def _group(self, number: int, keys: NodeKeys) -> tuple[NodeDescription, ...]:
        place = f"nodes.{number}"
        with self._at_key(f"{place}.profile"):
            base = None if keys.profile is None else profile(keys.profile)
        name = keys.name or (keys.profile or "node").lower()
        if not _NAME.fullmatch(name) or name in {COORDINATOR, _EVERYBODY}:
            fix = "use up to 40 of a-z, 0-9 and -; coordinator and all are taken"
            raise self._error(f"{place}.name", f'"{name}" is no name for nodes', fix)
        with self._at_key(f"{place}.churn"):
            churn_keys = self._keys.churn if keys.churn is None else keys.churn
            churn = _churn_of(churn_keys, base.churn if base else "")
        traces = tuple(self._traces(place, keys))
        with self._at_key(place):
            shape = keys.shape(base.shape if base else None)
            shape = replace(shape, traces=traces, starts_at_hour=self._keys.hour)
            _require_possible(shape)
        node = NodeDescription(
            name=name,
            group=name,
            profile=keys.profile or "",
            shape=shape,
            churn=churn,
            step_floor_ms=keys.step_floor_ms,
            memory_bytes=Bytes(keys.memory_mib << 20),
            micro_batch_max=keys.micro_batch_max,
        )
        if keys.count == 1:
            return (node,)
        return tuple(replace(node, name=f"{name}-{n}") for n in range(1, keys.count + 1))

    def _traces(self, place: str, keys: NodeKeys) -> Iterator[LinkTrace]:
        for key in ("trace", "trace_up", "trace_down"):
            name: str | None = getattr(keys, key)
            if name is None:
                continue
            with self._at_key(f"{place}.{key}"):
                raw = self._read_file(name)
                if key == "trace":
                    yield csv_trace(raw, name)
                else:
                    yield mahimahi_trace(raw, name, way="up" if key == "trace_up" else "down")

    def _check_names(self, groups: list[tuple[NodeDescription, ...]]) -> None:
        seen_names: set[str] = set()
        for number, group in enumerate(groups):
            names = {group[0].group, *(node.name for node in group)}
            if twice := sorted(names & seen_names):
                fix = "give each group its own name"
                raise self._error(f"nodes.{number}.name", f'"{twice[0]}" is taken', fix)
            seen_names |= names
        if sum(map(len, groups)) > NODES_MAX:
            raise self._error("nodes", f"more than {NODES_MAX} nodes", "lower the counts")

    def _faults(self, targets: Mapping[str, tuple[str, ...]]) -> Iterator[WorldFault]:
        """Yield each fault for each of its targets, ended by the first heal after it began."""
        faults: list[WorldFault] = []
        heals: list[tuple[str, Milliseconds]] = []
        for number, entry in enumerate(self._keys.faults):
            names = self._names(f"faults.{number}", entry, targets)
            if isinstance(entry, HealEntry):
                heals.extend((name, entry.at_ms) for name in names)
            elif entry.lasts_ms == 0:
                fix = "lengthen it, or leave for away"
                raise self._error(f"faults.{number}.for", "a fault of no length", fix)
            else:
                faults.extend(replace(entry, nodes=name) for name in names)
        for fault in sorted(faults, key=lambda each: each.at_ms):
            spans_ms = [
                heal_ms - fault.at_ms
                for name, heal_ms in heals
                if name == fault.target and heal_ms > fault.at_ms
            ]
            if fault.lasts_ms is not None:
                spans_ms.append(fault.lasts_ms)
            yield replace(fault, lasts_ms=min(spans_ms, default=None))

    def _pairs(self, targets: Mapping[str, tuple[str, ...]]) -> tuple[PairDelay, ...]:
        """Each pair of nodes once, its names in order."""
        pairs: dict[tuple[str, str], PairDelay] = {}
        for number, keys in enumerate(self._keys.pairs):
            place = f"pairs.{number}"
            delay_us = Microseconds(round(keys.delay_ms * 1000))
            for first, second in self._pair_names(f"{place}.between", keys, targets):
                if (first, second) in pairs:
                    what = f"{first} and {second} have a delay already"
                    raise self._error(f"{place}.between", what, "state each pair once")
                pairs[first, second] = PairDelay(first, second, delay_us)
            if len(pairs) > PAIRS_MAX:
                what = f"more than {PAIRS_MAX} pairs of nodes"
                raise self._error(f"{place}.between", what, "name smaller groups")
        return tuple(pairs.values())

    def _pair_names(
        self, place: str, keys: PairKeys, targets: Mapping[str, tuple[str, ...]]
    ) -> list[tuple[str, str]]:
        for name in keys.between:
            self._check_target(place, name, targets)
            if name == COORDINATOR:
                fix = "give the node's own link its way to the coordinator: rtt_ms"
                raise self._error(place, "a pair has two nodes", fix)
        ends = [targets[name] for name in keys.between]
        if ends[0] != ends[1] and set(ends[0]) & set(ends[1]):
            fix = "name two groups, or the same group twice"
            raise self._error(place, "a node is on both sides of a pair", fix)
        names = {
            (min(first, second), max(first, second))
            for first in ends[0]
            for second in ends[1]
            if first != second
        }
        if not names:
            raise self._error(place, "a node has no delay to itself", "name two nodes")
        return sorted(names)

    def _check_target(self, place: str, name: str, targets: Mapping[str, tuple[str, ...]]) -> None:
        if name not in targets:
            nearest_name = nearest(name, list(targets))
            fix = (
                f'did you mean "{nearest_name}"?'
                if nearest_name
                else "name a node or a group of this file"
            )
            raise self._error(place, f'there is no node or group "{name}"', fix)

    def _names(
        self, place: str, entry: FaultEntry, targets: Mapping[str, tuple[str, ...]]
    ) -> tuple[str, ...]:
        names: dict[str, None] = {}
        for name in entry.targets:
            self._check_target(f"{place}.nodes", name, targets)
            names.update(dict.fromkeys(targets[name]))
        if COORDINATOR in names and entry.kind not in _OF_COORDINATOR:
            fix = f"name nodes; the coordinator knows {join_words(_OF_COORDINATOR[1:])}"
            raise self._error(f"{place}.nodes", f"the coordinator has no {entry.kind}", fix)
        return tuple(names)

    def _check_devices(
        self, nodes: tuple[NodeDescription, ...], faults: tuple[WorldFault, ...]
    ) -> None:
        floorless = {node.name for node in nodes if not node.step_floor_ms}
        for fault in faults:
            if isinstance(fault, SlowDeviceFault) and fault.target in floorless:
                what = f"{fault.target} has a slow device and no step_floor_ms"
                raise self._error("faults", what, "give the node step_floor_ms")


def _churn_of(given: str | Churn, profile_churn: str) -> Churn | None:
    """Return how a group comes and goes; None: its nodes stay."""
    if isinstance(given, Churn):
        return given
    name = profile_churn if given == _PROFILE_CHURN else given
    return None if name in {_NO_CHURN, ""} else churn_class(name)


def _require_possible(shape: Shape) -> None:
    """Reject a trace with a row that leaves no possible link."""
    for trace in shape.traces:
        course = LinkCourse(replace(shape, traces=(trace,)), key="")
        # Rates cannot make a link impossible: rows that differ in nothing else are tried once.
        rows = {
            (row.delay_us, row.jitter_us, row.loss, row.burst_packets): row for row in trace.rows
        }
        for row in rows.values():
            course.at(row.at_us)


def _targets(groups: list[tuple[NodeDescription, ...]]) -> Mapping[str, tuple[str, ...]]:
    targets: dict[str, tuple[str, ...]] = {COORDINATOR: (COORDINATOR,)}
    for group in groups:
        targets[group[0].group] = tuple(node.name for node in group)
        targets.update({node.name: (node.name,) for node in group})
    targets[_EVERYBODY] = tuple(node.name for group in groups for node in group)
    return targets


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror}"
        raise NetsimError(what, "check the path; it begins at the world file's folder") from None
    if len(raw) > most:
        raise NetsimError(f"{path} has more than {most} bytes", "cut it")
    return raw
