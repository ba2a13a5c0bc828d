"""Recorded links: what a file says of rate, delay and loss over time, played in a loop."""

import csv
import io
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from hypergpu.units import Microseconds, Milliseconds, several
from netsim.link.error import NetsimError
from netsim.link.link import STALLED_BITS_PER_S, Link, LinkDirection

TRACE_BYTES_MAX = 16 << 20
ROWS_MAX = 1_000_000
OPPORTUNITY_BITS = 1500 * 8


class TraceRow(msgspec.Struct, frozen=True, kw_only=True):
    """What holds from a moment on; None leaves the link's own value."""

    at_us: Microseconds
    up_bits_per_s: int | None = None
    down_bits_per_s: int | None = None
    delay_us: Microseconds | None = None
    """One way, of both directions."""
    jitter_us: Microseconds | None = None
    loss: float | None = None
    burst_packets: float | None = None


class LinkTrace(msgspec.Struct, frozen=True):
    """Rows in order of time, the first at 0; after ``period_us`` they begin again."""

    rows: tuple[TraceRow, ...]
    period_us: Microseconds

    def row_at(self, now_us: int) -> TraceRow:
        """The row that holds at a moment."""
        return self.rows[self._index(now_us)]

    def next_change_us(self, now_us: int) -> int:
        """When the next row begins to hold."""
        begun_us = now_us // self.period_us * self.period_us
        after = self._index(now_us) + 1
        return begun_us + (self.period_us if after == len(self.rows) else self.rows[after].at_us)

    def _index(self, now_us: int) -> int:
        return bisect_right(self.rows, now_us % self.period_us, key=_begins) - 1


def apply_row(link: Link, row: TraceRow) -> Link:
    """The link as a row has it.

    Raises:
        NetsimError: The row makes the link impossible, for example jitter above its delay.
    """
    both = {
        name: value
        for name in ("delay_us", "jitter_us", "loss", "burst_packets")
        if (value := getattr(row, name)) is not None
    }

    def replace_row(direction: LinkDirection, bits_per_s: int | None) -> LinkDirection:
        rate = {} if bits_per_s is None else {"bits_per_s": bits_per_s}
        return msgspec.structs.replace(direction, **both, **rate)

    return msgspec.structs.replace(
        link,
        up=replace_row(link.up, row.up_bits_per_s),
        down=replace_row(link.down, row.down_bits_per_s),
    )


def mahimahi_trace(
    raw: bytes, source: str, *, way: Literal["up", "down"], bin_ms: int = 100
) -> LinkTrace:
    """A trace from Mahimahi's format: a line for each chance to deliver 1500 bytes, in ms.

    The chances of each ``bin_ms`` become one rate, so that the volume of every bin is kept.

    Raises:
        NetsimError: It is not such a file; says the line.
    """
    times_ms = [
        _millisecond(line, f"{source}:{number}")
        for number, line in _lines(raw, source)
        if line.strip()
    ]
    _require_order(times_ms, source)
    if not times_ms or not times_ms[-1]:
        raise NetsimError(f"{source} holds no time above 0", "give one millisecond a line")
    period_ms = times_ms[-1]
    if period_ms > ROWS_MAX * bin_ms:
        raise NetsimError(f"{source} lasts {period_ms} ms", f"end it by {ROWS_MAX * bin_ms} ms")
    # The last chance ends the loop: it belongs to the last bin, not to the next loop's first.
    counts = Counter(min(time_ms, period_ms - 1) // bin_ms for time_ms in times_ms)
    rows = []
    for number in range(-(-period_ms // bin_ms)):
        lasting_ms = min(bin_ms, period_ms - number * bin_ms)
        rate = counts[number] * OPPORTUNITY_BITS * 1000 // lasting_ms or STALLED_BITS_PER_S
        at_us = Microseconds(number * bin_ms * 1000)
        if way == "up":
            rows.append(TraceRow(at_us=at_us, up_bits_per_s=rate))
        else:
            rows.append(TraceRow(at_us=at_us, down_bits_per_s=rate))
    return LinkTrace(tuple(rows), Microseconds(period_ms * 1000))


_COLUMNS: dict[str, tuple[str, Callable[[float], float | int], float]] = {
    "time_s": ("at_us", lambda s: round(s * 1e6), 1e7),
    "up_mbit_s": ("up_bits_per_s", lambda rate: round(rate * 1e6) or STALLED_BITS_PER_S, 1e6),
    "down_mbit_s": ("down_bits_per_s", lambda rate: round(rate * 1e6) or STALLED_BITS_PER_S, 1e6),
    "delay_ms": ("delay_us", lambda ms: round(ms * 1e3), 60_000),
    "jitter_ms": ("jitter_us", lambda ms: round(ms * 1e3), 60_000),
    "loss_percent": ("loss", lambda percent: percent / 100, 99.9),
    "burst_packets": ("burst_packets", float, 1e6),
}
"""Column: the field it sets, how, and the most it takes."""


def csv_trace(raw: bytes, source: str) -> LinkTrace:
    """A trace from a table with a header: ``time_s`` and any of the other columns.

    An empty cell keeps the link's own value. A rate of 0 is a gap. The last row lasts as long as
    the one before it; then the table begins again. A table of one row never changes.

    Raises:
        NetsimError: It is not such a file; says the line.
    """
    lines = [line for _, line in _lines(raw, source)]
    reader = csv.reader(io.StringIO("\n".join(lines)))
    header = [cell.strip() for cell in next(reader, [])]
    for column in header:
        if column not in _COLUMNS or header.count(column) > 1 or "time_s" not in header:
            raise NetsimError(
                f'{source}:1: the columns "{", ".join(header)}" are none of a trace',
                f"give time_s and any of {', '.join(list(_COLUMNS)[1:])}, each once",
            )
    rows = [
        _row(header, cells, f"{source}:{reader.line_num}")
        for cells in reader
        if any(cell.strip() for cell in cells)
    ]
    _require_order([row.at_us for row in rows], source, is_strict=True)
    if not rows or rows[0].at_us:
        raise NetsimError(f"{source} does not begin at time_s 0", "add a row for time 0")
    last_us = rows[-1].at_us
    lasting_us = last_us - rows[-2].at_us if len(rows) > 1 else 1_000_000
    return LinkTrace(tuple(rows), Microseconds(last_us + lasting_us))


def _row(header: list[str], cells: list[str], where: str) -> TraceRow:
    if len(cells) != len(header):
        what = f"{where}: {several(len(cells), 'cell')} under {several(len(header), 'column')}"
        raise NetsimError(what, "give one cell a column; an empty one keeps the link's value")
    values: dict[str, float | int] = {}
    for column, cell in zip(header, cells, strict=True):
        field, taken, most = _COLUMNS[column]
        if cell.strip():
            values[field] = taken(_number(cell, most, f"{where}: {column}"))
    if "at_us" not in values:
        raise NetsimError(f"{where}: time_s is empty", "say when the row begins")
    return msgspec.convert(values, TraceRow)


def _number(cell: str, most: float, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise NetsimError(f'{where} is "{cell.strip()[:40]}"', f"give a number in [0, {most:g}]")
    return number


def _millisecond(line: str, where: str) -> Milliseconds:
    word = line.strip()
    if not (word.isascii() and word.isdecimal() and len(word) <= 10):
        raise NetsimError(f'{where}: "{word[:40]}" is no millisecond', "give one whole number")
    return Milliseconds(int(word))


def _lines(raw: bytes, source: str) -> Iterator[tuple[int, str]]:
    if len(raw) > TRACE_BYTES_MAX:
        what = f"{source} has {len(raw)} bytes, more than {TRACE_BYTES_MAX}"
        raise NetsimError(what, "cut the trace; it is played in a loop")
    try:
        lines = raw.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as broken:
        raise NetsimError(f"{source}: byte {broken.start} is no text", "save it as text") from None
    if len(lines) > ROWS_MAX:
        raise NetsimError(f"{source} has more than {ROWS_MAX} lines", "cut the trace")
    return enumerate(lines, start=1)


def _require_order(
    times: list[Milliseconds] | list[Microseconds], source: str, *, is_strict: bool = False
) -> None:
    for number, (before, after) in enumerate(itertools.pairwise(times), start=2):
        if after < before or (is_strict and after == before):
            raise NetsimError(f"{source}: row {number} is not after row {number - 1}", "sort it")


def _begins(row: TraceRow) -> int:
    return row.at_us
