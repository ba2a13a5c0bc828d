"""A link between one node and the coordinator, as plain numbers or a recording of them in time.

Every backend gets these. Nothing here draws at random or keeps a state.
"""

import csv
import io
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from coordinator.core.network.tcp import CongestionControl
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Microseconds, Milliseconds, several


class NetsimError(HyperGPUError):
    """Nothing was started, or everything that was started is gone again.

    Args:
        detail: What is impossible and where: a file's key, a device, a number.
        fix: What the reader should do.
    """

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(Reason.NETWORK_REFUSED, detail, fix=fix)


STALLED_BITS_PER_S = 1
"""The rate of a link in a gap: what waits goes on waiting. Zero is taken: it means no limit."""


class LinkDirection(msgspec.Struct, frozen=True, kw_only=True):
    """One way of a link, from one end's queue to the other end.

    Raises:
        NetsimError: No link can be like that.
    """

    delay_us: Microseconds
    """Propagation, one way, before jitter."""
    jitter_us: Microseconds = Microseconds(0)
    """Standard deviation of the delay around ``delay_us``."""
    jitter_memory_ms: Milliseconds = Milliseconds(200)
    """Correlation time of the jitter: after it, 1/e of a deviation is left."""
    jitter_is_clamped: bool = False
    """Lets ``jitter_us`` exceed ``delay_us``: delays are cut off at zero and their mean rises."""
    loss: float = 0.0
    """Share of packets lost, in [0, 1)."""
    burst_packets: float = 1.0
    """Mean number of packets in a row that are lost together, at least 1."""
    bits_per_s: int
    """Rate of the bottleneck, headers included; 0: no limit."""
    queue_ms: Milliseconds = Milliseconds(100)
    """Buffer before the bottleneck, as the time it takes to drain at ``bits_per_s``."""
    reordering: float = 0.0
    """Share of packets that overtake those before them, in [0, 1)."""
    duplication: float = 0.0
    """Share of packets that arrive twice, in [0, 1)."""

    def __post_init__(self) -> None:
        for what, fix in _contradictions(self):
            raise NetsimError(what, fix)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A node's way to the coordinator and back."""

    up: LinkDirection
    down: LinkDirection
    congestion_control: CongestionControl = CongestionControl.CUBIC

    @property
    def rtt_us(self) -> Microseconds:
        """Propagation there and back, without jitter, queues and serialisation."""
        return Microseconds(self.up.delay_us + self.down.delay_us)


def most_loss(burst_packets: float) -> float:
    """The greatest share of packets that can be lost in bursts of this mean length.

    Each burst is followed by one packet at least that arrives.
    """
    return burst_packets / (1 + burst_packets)


def _contradictions(direction: LinkDirection) -> Iterator[tuple[str, str]]:
    yield from _ranges(direction)
    most = most_loss(direction.burst_packets)
    if direction.loss > most:
        bursts = f"bursts of {direction.burst_packets:g} packets, each followed by one that arrives"
        what = f"a loss of {direction.loss:g} cannot come in {bursts}"
        yield what, f"lower the loss to {most:.6g} at most, or lengthen the bursts"
    if direction.jitter_us > direction.delay_us and not direction.jitter_is_clamped:
        what = f"jitter of {direction.jitter_us} us exceeds the delay of {direction.delay_us} us"
        yield what, "lower the jitter to the delay at most, or clamp it (jitter_is_clamped)"


def _ranges(direction: LinkDirection) -> Iterator[tuple[str, str]]:
    for name, least in (
        ("delay_us", 0),
        ("jitter_us", 0),
        ("jitter_memory_ms", 1),
        ("bits_per_s", 0),
        ("queue_ms", 1),
    ):
        if getattr(direction, name) < least:
            yield f"{name} is {getattr(direction, name)}", f"give {least} or more"
    for name in ("loss", "reordering", "duplication"):
        share = getattr(direction, name)
        if not 0 <= share < 1:
            yield f"{name} is {share:g}", "give a share in [0, 1): 0.01 is 1 %"
    if not (direction.burst_packets >= 1 and math.isfinite(direction.burst_packets)):
        what = f"burst_packets is {direction.burst_packets:g}"
        yield what, "give 1 (each loss alone) or more"


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
        field, convert, most = _COLUMNS[column]
        if cell.strip():
            values[field] = convert(_number(cell, most, f"{where}: {column}"))
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
    except UnicodeDecodeError as error:
        raise NetsimError(f"{source}: byte {error.start} is no text", "save it as text") from None
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
