"""What more connections carry over lines that lose packets: our own stripes and ranges."""

import asyncio
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.connections.coordinator_end import SIZE_BYTES
from benchmarks.ours.connections.lane import TransferLane, open_lane
from benchmarks.ours.connections.node_end import TransferOrder
from benchmarks.table import ResultTable
from hypergpu.units import Microseconds
from netsim.link.link import CongestionControl, Direction, Link
from netsim.link.shape import Way
from netsim.tunnel.measured import network
from netsim.tunnel.requirements import CONTROLS as KERNEL_CONTROLS
from netsim.tunnel.tunnel import Tunnel

MBIT = 1_000_000
DELAY_US = Microseconds(50_000)
COUNTS = (1, 4, 8, 16)
WAYS: tuple[Way, ...] = ("up", "down")
CONTROLS = (CongestionControl.CUBIC, CongestionControl.BBR)
FLOOD_S = 2.0


class Extent(NamedTuple):
    """How much is measured."""

    lines_mbit_s: tuple[int, ...]
    turns: int
    lanes: int
    """Nodes that measure the same at once, each over a link of its own."""


FULL = Extent((100, 20), turns=3, lanes=2)
QUICK = Extent((100,), turns=1, lanes=1)


class Loss(NamedTuple):
    """Packet loss, the same in both directions of a line."""

    name: str
    share: float
    burst_packets: float


LOSSES = (
    Loss("bursts", 0.01, 4),
    Loss("independent", 0.01, 1),
    Loss("none", 0, 1),
)


class Cell(NamedTuple):
    """One way of one line."""

    mbit_s: int
    loss: Loss
    way: Way


class ConnectionContender(NamedTuple):
    """How senders know what a line carries, and over how many connections."""

    control: CongestionControl
    connections: int

    @property
    def name(self) -> str:
        """In the table."""
        return "BBR, 1" if self.control is CongestionControl.BBR else str(self.connections)


COLUMNS = (
    *(ConnectionContender(CongestionControl.CUBIC, count) for count in COUNTS),
    ConnectionContender(CongestionControl.BBR, 1),
)


class Goodputs:
    """Mbit/s of every transfer, and which of them count."""

    def __init__(self) -> None:
        self._all: dict[tuple[Cell, ConnectionContender], list[float]] = defaultdict(list)
        self.breaks = 0
        self.late = 0

    def add(
        self, cell: Cell, column: ConnectionContender, mbit_s: float, *, is_valid: bool
    ) -> None:
        """Take one; what moved while the router was late does not count."""
        if is_valid:
            self._all[cell, column].append(mbit_s)
        else:
            self.late += 1

    def median(self, cell: Cell, column: ConnectionContender) -> float | None:
        """Median of the transfers that count; None where none does."""
        found = self._all.get((cell, column))
        return statistics.median(found) if found else None


def run(is_quick: bool) -> ResultTable:
    """Move a model down and updates up, over every line and number of connections."""
    extent = QUICK if is_quick else FULL
    lines = extent.lines_mbit_s
    cells = [Cell(line, loss, way) for line in lines for loss in LOSSES for way in WAYS]
    goodputs = Goodputs()
    with tempfile.TemporaryDirectory() as folder:
        carried = asyncio.run(_measure_lines(Path(folder), cells, extent, goodputs))
    return ResultTable(
        title=f"Goodput of {SIZE_BYTES >> 20} MiB by connections at RTT 100 ms, Mbit/s",
        columns=("", *(column.name for column in COLUMNS), "best / 1", "of the line"),
        rows=[_row(cell, goodputs, carried[cell.mbit_s]) for cell in cells],
        metrics=_metrics(cells, goodputs, carried),
        notes=(
            f"Medians of {extent.turns * extent.lanes}; up: updates in stripes, down: ranges.",
            "Real coordinator and daemon parts, mutual TLS, CUBIC; handshakes are not counted.",
            "1 % loss both ways, in bursts of 4 on average, each packet by itself, or none.",
            "Of the line: the best of CUBIC, of what a UDP flood got through in the same run: "
            + ", ".join(f"{carried[line]:.2f} of {line}" for line in lines),
            f"Broken connections, which went on: {goodputs.breaks}. Router late: {goodputs.late}.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


class _Bench(NamedTuple):
    """One lane, and what it has to measure in this order."""

    name: str
    control: CongestionControl
    errands: Sequence[tuple[Cell, ConnectionContender]]


def _benches(cells: Sequence[Cell], extent: Extent) -> list[_Bench]:
    """Not all measure the same at the same time: where they meet, they differ."""
    present = KERNEL_CONTROLS.read_text("ascii").split()
    controls = [control for control in CONTROLS if control in present]
    kinds = [(way, control) for way in WAYS for control in controls] * extent.lanes
    benches = []
    for place, (way, control) in enumerate(kinds):
        errands = [
            (cell, column)
            for cell in cells
            for column in COLUMNS
            if cell.way == way and column.control is control
        ]
        begin = place * len(errands) // len(kinds)
        order = [*errands[begin:], *errands[:begin]] * extent.turns
        benches.append(_Bench(f"{control}-{way}-{place}", control, order))
    return benches


async def _measure_lines(
    folder: Path, cells: Sequence[Cell], extent: Extent, goodputs: Goodputs
) -> dict[int, float]:
    """Fill the goodputs; gives what each line carries, in Mbit/s."""
    benches = _benches(cells, extent)
    links = {bench.name: _link(0, LOSSES[-1], bench.control) for bench in benches}
    all_opened = asyncio.Barrier(len(benches))
    async with Tunnel(links, _link(0, LOSSES[-1]), seed=1) as tunnel:
        first = benches[0].name
        carried = {
            line: await _line_rate_mbit_s(tunnel, first, line) for line in extent.lines_mbit_s
        }
        await tunnel.set(first, links[first])

        async def work(bench: _Bench) -> None:
            async with open_lane(tunnel, bench.name, folder / bench.name) as lane:
                await all_opened.wait()
                for cell, column in bench.errands:
                    link = _link(cell.mbit_s, cell.loss, column.control)
                    await tunnel.set(bench.name, link)
                    await _move(tunnel, lane, (cell, column), goodputs)

        async with asyncio.TaskGroup() as group:
            for bench in benches:
                group.create_task(work(bench))
    return carried


async def _move(
    tunnel: Tunnel, lane: TransferLane, errand: tuple[Cell, ConnectionContender], goodputs: Goodputs
) -> None:
    cell, column = errand
    before = (await tunnel.statistics()).lateness
    moved = await lane.move(TransferOrder(cell.way, column.connections))
    added = (await tunnel.statistics()).lateness.since(before)
    mbit_s = 8 * SIZE_BYTES / moved.took_s / MBIT
    goodputs.add(cell, column, mbit_s, is_valid=added.is_valid)
    goodputs.breaks += moved.breaks


async def _line_rate_mbit_s(tunnel: Tunnel, name: str, line_mbit_s: int) -> float:
    """What a line lets through of a flood of full packets, headers included, in Mbit/s."""
    await tunnel.set(name, _link(line_mbit_s, LOSSES[-1]))
    offered = round(1.4 * line_mbit_s * MBIT)
    arrivals = await network(tunnel, name).flood("up", bits_per_s=offered, for_s=FLOOD_S)
    return arrivals.saturated_bits_per_s() / MBIT


def _link(mbit_s: int, loss: Loss, control: CongestionControl = CongestionControl.CUBIC) -> Link:
    """The same both ways; 0 is a line without delay, for whatever is not measured."""
    way = Direction(
        delay_us=DELAY_US if mbit_s else Microseconds(0),
        bits_per_s=mbit_s * MBIT,
        loss=loss.share,
        burst_packets=loss.burst_packets,
    )
    return Link(up=way, down=way, congestion_control=control)


def _row(cell: Cell, goodputs: Goodputs, carried_mbit_s: float) -> list[str]:
    found = [goodputs.median(cell, column) for column in COLUMNS]
    name = f"{cell.mbit_s} Mbit/s, {cell.loss.name}, {cell.way}"
    is_valid = None not in found[: len(COUNTS)] and carried_mbit_s > 0
    return [
        name if is_valid else f"{name} (INVALID)",
        *("-" if each is None else f"{each:.1f}" for each in found),
        f"{_gain(cell, goodputs):.1f}x",
        f"{_best(cell, goodputs) / carried_mbit_s:.0%}" if carried_mbit_s else "-",
    ]


def _best(cell: Cell, goodputs: Goodputs) -> float:
    """Best goodput of all numbers of connections under CUBIC."""
    cubic = [column for column in COLUMNS if column.control is CongestionControl.CUBIC]
    return max(goodputs.median(cell, column) or 0.0 for column in cubic)


def _gain(cell: Cell, goodputs: Goodputs) -> float:
    """The best over one connection; 0 where that one does not count."""
    one = goodputs.median(cell, COLUMNS[0])
    return _best(cell, goodputs) / one if one else 0.0


def _metrics(
    cells: Sequence[Cell], goodputs: Goodputs, carried: dict[int, float]
) -> dict[str, float]:
    metrics = {f"line_{line}_mbit_s": mbit_s for line, mbit_s in carried.items()}
    for cell in cells:
        name = f"{cell.way}_{cell.loss.name}_{cell.mbit_s}"
        for column in COLUMNS:
            kind = "bbr" if column.control is CongestionControl.BBR else str(column.connections)
            median = goodputs.median(cell, column)
            if median is not None:
                metrics[f"{name}_{kind}_mbit_s"] = median
        metrics[f"{name}_gain"] = _gain(cell, goodputs)
    metrics["late_transfers"] = float(goodputs.late)
    return metrics
