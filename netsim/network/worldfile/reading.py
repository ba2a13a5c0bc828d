"""TOML text into a world. The first thing that is wrong is refused with its place and the fix."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from hypergpu.units import Bytes
from netsim.error import NetsimError
from netsim.link import Link, LinkCourse, Trace, Variation, csv_trace, mahimahi_trace
from netsim.link.trace import TRACE_BYTES_MAX
from netsim.network.profiles import Churn, profile
from netsim.network.worldfile.churns import NONE, read_churn, read_word_or_table
from netsim.network.worldfile.description import (
    COORDINATOR,
    Fault,
    FaultKind,
    NodeDescription,
    WorldDescription,
)
from netsim.network.worldfile.faults import EVERYBODY, read_faults
from netsim.network.worldfile.jobs import ReadFile, read_job
from netsim.network.worldfile.links import read_link, read_variation
from netsim.network.worldfile.places import Places
from netsim.network.worldfile.table import Table

FILE_BYTES_MAX = 1 << 20
NODES_MAX = 20_000
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_COORDINATOR_MBIT_S = 100.0


def read_world_file(path: Path) -> WorldDescription:
    """Read a world file, and the job and traces that it names, from its own folder on.

    Raises:
        NetsimError: It describes no world.
    """

    def beside(name: str) -> bytes:
        return _read(path.parent / name, TRACE_BYTES_MAX)

    raw = _read(path, FILE_BYTES_MAX)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as broken:
        raise NetsimError(f"{path}: byte {broken.start} is not UTF-8", "save it so") from None
    return parse_world(text, source=str(path), name=path.stem, read_file=beside)


def parse_world(
    text: str, *, source: str, name: str = "world", read_file: ReadFile | None = None
) -> WorldDescription:
    """The world that a text describes.

    Args:
        text: TOML.
        source: Names the text in messages.
        name: The world's, unless the text gives one.
        read_file: How to get the job and the traces that the text names.

    Raises:
        NetsimError: It describes no world.
    """
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as broken:
        raise NetsimError(f"{source}: it is not TOML: {broken}", "correct the syntax") from None
    return _world(Table(tree, "", Places(source, text)), name, read_file or _no_files)


def _world(table: Table, name: str, read_file: ReadFile) -> WorldDescription:
    name = table.text("name") or name
    seed = table.whole("seed", 0, 2**63 - 1)
    hour = table.number("hour", 0, 24)
    churn = read_word_or_table(table) if table.has("churn") else NONE
    speed = table.number("churn_speed", 0.001, 1e6)
    job = read_job(table, read_file)
    coordinator = table.table("coordinator") or Table({}, "coordinator", Places(""))
    line = read_link(coordinator, _coordinator_line())
    coordinator.finish()
    tables = table.tables("nodes")
    if not tables:
        raise table.refused("nodes", "no nodes", 'add [[nodes]] with profile = "home-fibre"')
    groups = [_group(each, churn, read_file) for each in tables]
    _check_names(tables, groups)
    nodes = tuple(node for group in groups for node in group)
    faults = tuple(read_faults(table.tables("faults") or (), _targets(groups)))
    _check_devices(table, nodes, faults)
    table.finish()
    return WorldDescription(
        name=name,
        seed=seed or 0,
        starts_at_hour=12.0 if hour is None else hour,
        job=job,
        coordinator=line,
        nodes=nodes,
        faults=faults,
        churn_speed=1.0 if speed is None else speed,
    )


def _group(table: Table, churn: Churn | str, read_file: ReadFile) -> tuple[NodeDescription, ...]:
    said = table.text("profile")
    with table.placed("profile"):
        entry = profile(said) if said is not None else None
    link = read_link(table, entry.link if entry else None)
    variation = read_variation(table, entry.variation if entry else Variation())
    traces = tuple(_traces(table, read_file))
    group = table.text("name") or (said or "node").lower()
    if not _NAME.fullmatch(group) or group in {COORDINATOR, EVERYBODY}:
        fix = "use up to 40 of a-z, 0-9 and -; coordinator and all are taken"
        raise table.refused("name", f'"{group}" is no name for nodes', fix)
    count = table.whole("count", 1, NODES_MAX) or 1
    memory_mib = table.whole("memory_mib", 1, 1 << 22)
    node = NodeDescription(
        name=group,
        group=group,
        profile=said or "",
        link=link,
        variation=variation,
        traces=traces,
        churn=read_churn(table, churn, entry.churn if entry else ""),
        step_floor_ms=table.number("step_floor_ms", 0, 3_600_000) or 0.0,
        memory_bytes=Bytes((memory_mib or 0) << 20),
    )
    table.finish()
    with table.placed():
        _check_course(link, variation, traces)
    return tuple(msgspec.structs.replace(node, name=name) for name in _names(group, count))


def _names(group: str, count: int) -> Iterator[str]:
    if count == 1:
        yield group
    else:
        yield from (f"{group}-{number}" for number in range(1, count + 1))


def _traces(table: Table, read_file: ReadFile) -> Iterator[Trace]:
    for key in ("trace", "trace_up", "trace_down"):
        if (name := table.text(key)) is None:
            continue
        with table.placed(key):
            raw = read_file(name)
            if key == "trace":
                yield csv_trace(raw, name)
            else:
                yield mahimahi_trace(raw, name, way="up" if key == "trace_up" else "down")


def _check_course(link: Link, variation: Variation, traces: tuple[Trace, ...]) -> None:
    """Every row of every trace must leave a link that can be."""
    for trace in traces:
        course = LinkCourse(link, variation, key="", traces=(trace,))
        # Rates cannot make a link impossible: rows that differ by nothing else are tried once.
        tried = {(row.delay_us, row.jitter_us, row.loss, row.burst_packets) for row in trace.rows}
        for row in trace.rows:
            kind = (row.delay_us, row.jitter_us, row.loss, row.burst_packets)
            if kind in tried:
                tried.remove(kind)
                course.at(row.at_us)


def _check_names(tables: tuple[Table, ...], groups: list[tuple[NodeDescription, ...]]) -> None:
    seen: set[str] = set()
    for table, group in zip(tables, groups, strict=True):
        names = {group[0].group, *(node.name for node in group)}
        if twice := sorted(names & seen):
            raise table.refused("name", f'"{twice[0]}" is taken', "give each group its own name")
        seen |= names
    if sum(map(len, groups)) > NODES_MAX:
        raise tables[0].refused("", f"more than {NODES_MAX} nodes", "lower the counts")


def _check_devices(
    table: Table, nodes: tuple[NodeDescription, ...], faults: tuple[Fault, ...]
) -> None:
    floorless = {node.name for node in nodes if not node.step_floor_ms}
    for fault in faults:
        if fault.kind is FaultKind.SLOW_DEVICE and fault.target in floorless:
            what = f"{fault.target} has a slow device, and no time that its steps take at least"
            raise table.refused("faults", what, "give the node step_floor_ms")


def _targets(groups: list[tuple[NodeDescription, ...]]) -> Mapping[str, tuple[str, ...]]:
    targets: dict[str, tuple[str, ...]] = {COORDINATOR: (COORDINATOR,)}
    for group in groups:
        targets[group[0].group] = tuple(node.name for node in group)
        targets.update({node.name: (node.name,) for node in group})
    targets[EVERYBODY] = tuple(node.name for group in groups for node in group)
    return targets


def _coordinator_line() -> Link:
    rows = {"rtt_ms": 0, "up_mbit_s": _COORDINATOR_MBIT_S, "down_mbit_s": _COORDINATOR_MBIT_S}
    return read_link(Table(rows, "", Places("")), None)


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(most + 1)
    except OSError as broken:
        what = f"{path} cannot be read: {broken.strerror}"
        raise NetsimError(what, "check the path; it begins at the world file's folder") from None
    if len(raw) > most:
        raise NetsimError(f"{path} has more than {most} bytes", "cut it")
    return raw


def _no_files(name: str) -> bytes:
    raise NetsimError(f"there is no file {name} beside a text", "read the world from a file")
