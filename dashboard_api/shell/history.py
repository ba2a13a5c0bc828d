"""The dashboard's own history in a database: rounds, events, series, audit log. Calls block."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import URL, ColumnElement, Connection, create_engine, event, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url

from dashboard_api.core.series import (
    LEVELS,
    POINTS_MAX,
    Bucket,
    SeriesPoint,
    bucket_number,
    level_for,
    point_buckets,
    reduce_buckets,
)
from dashboard_api.core.state import EventLine
from dashboard_api.core.wall_clock import Anchor
from dashboard_api.shell.schema import (
    ANCHORS,
    AUDIT,
    EVENTS,
    JOBS,
    METADATA,
    POINTS,
    ROUNDS,
    VERSION,
    VERSIONS,
)

EVENTS_MOST = 1_000
FILE_NAME = "dashboard.sqlite"


class JobBatch(msgspec.Struct):
    """Everything that is new of one job since the last write."""

    next_sequence: int
    events: list[EventLine] = []
    rounds: dict[int, bytes] = {}
    points: list[SeriesPoint] = []


class AuditLine(msgspec.Struct, frozen=True):
    """An action of a user."""

    at_ms: int
    token: str
    """Id of the token that acted."""
    role: str
    action: str
    outcome: str


class EventSearch(msgspec.Struct, frozen=True):
    """Which events of a job are wanted, newest first."""

    job: str
    query: str = ""
    kind: str = ""
    before: int | None = None
    """Sequence number that all found ones are below."""
    limit: int = 100
    nodes: tuple[str, ...] | None = None
    """Events about other nodes are left out; None: none is."""


class SeriesSpan(msgspec.Struct, frozen=True):
    """Which part of a series is wanted, in how much detail."""

    scope: str
    name: str
    points: int
    from_index: int = 0
    to_index: int | None = None


class HistoryStore:
    """One database. Writers take turns; a second server on the same SQLite file waits for them."""

    def __init__(self, url: str | URL) -> None:
        self._engine = create_engine(make_url(url))
        self._writing = threading.Lock()
        self._insert: Any = (
            sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        )
        self._merge = self._merging()
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _tune_sqlite)
        METADATA.create_all(self._engine)
        with self._engine.begin() as connection:
            self._put(connection, VERSIONS, [{"version": VERSION}])

    @property
    def engine(self) -> Any:
        """The database, for tables of others of this package."""
        return self._engine

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def next_sequence(self, job: str) -> int:
        """The first sequence number of a job's journal that was not written yet."""
        with self._engine.connect() as connection:
            query = select(JOBS.c.next_sequence).where(JOBS.c.job == job)
            return connection.scalar(query) or 0

    def anchors(self, job: str) -> list[Anchor]:
        """Distances of a job's time from the wall clock."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(ANCHORS).where(ANCHORS.c.job == job))
            return [Anchor(row.from_job_ms, row.distance_ms) for row in rows]

    def add_anchor(self, job: str, anchor: Anchor) -> None:
        """Keep a distance."""
        row = {"job": job, **msgspec.structs.asdict(anchor)}
        with self._writing, self._engine.begin() as connection:
            self._put(connection, ANCHORS, [row])

    def write_job(self, job: str, batch: JobBatch) -> None:
        """Write what is new of a job in one transaction; what is there already stays as it is."""
        lines = [{"job": job, **msgspec.structs.asdict(each)} for each in batch.events]
        bodies = [
            {"job": job, "number": number, "body": body} for number, body in batch.rounds.items()
        ]
        with self._writing, self._engine.begin() as connection:
            self._put(connection, EVENTS, lines)
            self._replace(connection, ROUNDS, bodies, ("body",))
            self._add_points(connection, f"job/{job}", batch.points)
            row = {"job": job, "next_sequence": batch.next_sequence}
            self._replace(connection, JOBS, [row], ("next_sequence",))

    def add_points(self, scope: str, points: Sequence[SeriesPoint]) -> None:
        """Add points to series of a scope; a point that is there already counts once."""
        with self._writing, self._engine.begin() as connection:
            self._add_points(connection, scope, points)

    def add_readings(self, points: Mapping[str, Sequence[SeriesPoint]]) -> None:
        """Add points that are known to be new to series, by scope."""
        rows = [
            row
            for scope, scope_points in points.items()
            for point in scope_points
            for row in _rows(scope, point.name, [point])
        ]
        with self._writing, self._engine.begin() as connection:
            if rows:
                connection.execute(self._merge, rows)

    def _add_points(
        self, connection: Connection, scope: str, points: Sequence[SeriesPoint]
    ) -> None:
        by_name: dict[str, dict[int, SeriesPoint]] = {}
        for point in points:
            by_name.setdefault(point.name, {})[point.index] = point
        for name, points_by_number in by_name.items():
            fresh = self._fresh(connection, scope, name, points_by_number)
            if rows := list(_rows(scope, name, fresh)):
                connection.execute(self._merge, rows)

    def _fresh(
        self, connection: Connection, scope: str, name: str, given: dict[int, SeriesPoint]
    ) -> list[SeriesPoint]:
        """The points that are not there, ascending."""
        numbers = sorted(given)
        query = select(POINTS.c.number).where(
            *(POINTS.c.scope == scope, POINTS.c.name == name, POINTS.c.level == 0),
            POINTS.c.number.between(numbers[0], numbers[-1]),
        )
        there = set(connection.scalars(query))
        return [given[number] for number in numbers if number not in there]

    def _merging(self) -> Any:
        """The statement that adds a bucket to the one that covers the same points."""
        insertion = self._insert(POINTS)
        new = insertion.excluded
        # SQLite calls the least of two values min, PostgreSQL least.
        is_sqlite = self._engine.dialect.name == "sqlite"
        least, greatest = (func.min, func.max) if is_sqlite else (func.least, func.greatest)
        return insertion.on_conflict_do_update(
            index_elements=["scope", "name", "level", "number"],
            set_={
                "least": least(POINTS.c.least, new.least),
                "greatest": greatest(POINTS.c.greatest, new.greatest),
                "total": POINTS.c.total + new.total,
                "count": POINTS.c["count"] + new["count"],
            },
        )

    def series(self, span: SeriesSpan) -> list[Bucket]:
        """A series with at most so many buckets; every extreme of the span is in one of them."""
        conditions = (POINTS.c.scope == span.scope, POINTS.c.name == span.name)
        points = max(1, min(span.points, POINTS_MAX))
        with self._engine.connect() as connection:
            # One query for both would look at every point.
            ends = (func.min(POINTS.c.number), func.max(POINTS.c.number))
            first, last = (
                connection.scalar(select(end).where(*conditions, POINTS.c.level == 0))
                for end in ends
            )
            if first is None or last is None:
                return []
            # A node's indices are times: nearly all of them lie before its first reading.
            from_index = max(first, span.from_index)
            to_index = last if span.to_index is None else min(last, span.to_index)
            level = level_for(to_index - from_index + 1, points)
            within = POINTS.c.number.between(
                bucket_number(from_index, level), bucket_number(to_index, level)
            )
            columns = (
                *(POINTS.c.number, POINTS.c.at_ms, POINTS.c.moved_bytes, POINTS.c.round),
                *(POINTS.c.least, POINTS.c.greatest, POINTS.c.total, POINTS.c["count"]),
            )
            rows = connection.execute(
                select(*columns)
                .where(*conditions, POINTS.c.level == level, within)
                .order_by(POINTS.c.number)
            )
            return reduce_buckets([Bucket(*row) for row in rows], points)

    def rounds(self, job: str, first: int, last: int) -> list[bytes]:
        """Rounds of a job as JSON, ascending."""
        with self._engine.connect() as connection:
            conditions = (ROUNDS.c.job == job, ROUNDS.c.number.between(first, last))
            query = select(ROUNDS.c.body).where(*conditions).order_by(ROUNDS.c.number)
            return [bytes(body) for body in connection.scalars(query)]

    def events(self, search: EventSearch) -> list[dict[str, Any]]:
        """Events of a job, newest first."""
        conditions: list[ColumnElement[bool]] = [EVENTS.c.job == search.job]
        if search.query:
            conditions.append(EVENTS.c.text.icontains(search.query, autoescape=True))
        if search.kind:
            conditions.append(EVENTS.c.kind == search.kind)
        if search.before is not None:
            conditions.append(EVENTS.c.sequence < search.before)
        if search.nodes is not None:
            conditions.append(EVENTS.c.node.is_(None) | EVENTS.c.node.in_(search.nodes))
        limit = max(1, min(search.limit, EVENTS_MOST))
        columns = [each for each in EVENTS.c if each.name != "job"]
        with self._engine.connect() as connection:
            query = (
                select(*columns).where(*conditions).order_by(EVENTS.c.sequence.desc()).limit(limit)
            )
            return [dict(row) for row in connection.execute(query).mappings()]

    def add_audit(self, line: AuditLine) -> None:
        """Write an action down."""
        with self._writing, self._engine.begin() as connection:
            connection.execute(AUDIT.insert(), [msgspec.structs.asdict(line)])

    def audit(self, limit: int) -> list[dict[str, Any]]:
        """The newest actions, newest first."""
        with self._engine.connect() as connection:
            query = select(AUDIT).order_by(AUDIT.c.number.desc()).limit(limit)
            return [dict(row) for row in connection.execute(query).mappings()]

    def _put(self, connection: Connection, table: Any, rows: Iterable[dict[str, Any]]) -> None:
        if row_list := list(rows):
            connection.execute(self._insert(table).on_conflict_do_nothing(), row_list)

    def _replace(
        self,
        connection: Connection,
        table: Any,
        rows: list[dict[str, Any]],
        columns: Sequence[str],
    ) -> None:
        if not rows:
            return
        insertion = self._insert(table)
        new_values = {name: insertion.excluded[name] for name in columns}
        keys = [each.name for each in table.primary_key]
        connection.execute(
            insertion.on_conflict_do_update(index_elements=keys, set_=new_values), rows
        )


def _rows(scope: str, name: str, points: Sequence[SeriesPoint]) -> Iterator[dict[str, Any]]:
    """Rows of every level that cover the points, which ascend by index."""
    for level in range(LEVELS):
        for bucket in point_buckets(points, level):
            yield {"scope": scope, "name": name, "level": level, **msgspec.structs.asdict(bucket)}


def history_url(given: str, folder: Path) -> URL:
    """Where the history is: the given URL, else a SQLite file in the folder, which is made."""
    if given:
        return make_url(given)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return URL.create("sqlite", database=str(folder / FILE_NAME))


def _tune_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    # Nothing in here is a truth: the journal is. Less than a second may be lost with the power.
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()
