"""What was asked beside what the reference did: a table for people, a file for programs."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec

from netsim.link.link import Link
from netsim.reference.cells import Cell
from netsim.reference.guest import Measured

US = 1_000_000
HEADINGS = ("link", "RTT ms", "deviation ms", "loss %", "burst", "4 MiB down s", "1 MiB up s")


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One cell of the file."""

    asked: Link
    download_mib: tuple[int, ...]
    measured: Measured


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The file ``build/netsim-reference.json``."""

    kernel: str
    runs: int
    """How many gave these very bits."""
    cells: tuple[Judged, ...]


def reference(
    kernel: str, runs: int, *, cells: Sequence[Cell], measured: Sequence[Measured]
) -> Reference:
    """Put what was asked and what was measured side by side."""
    by_name: Mapping[str, Measured] = {each.name: each for each in measured}
    return Reference(
        kernel=kernel,
        runs=runs,
        cells=tuple(
            Judged(asked=cell.link, download_mib=cell.download_mib, measured=by_name[cell.name])
            for cell in cells
        ),
    )


def table(found: Reference) -> str:
    """Write the table; where two numbers stand, the first was asked."""
    rows = [HEADINGS, *(tuple(_row(judged)) for judged in found.cells)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _row(judged: Judged) -> Iterator[str]:
    asked, measured = judged.asked, judged.measured
    lost = measured.lost / measured.sent if measured.sent else 0.0
    burst = measured.lost / measured.bursts if measured.bursts else 0.0
    yield measured.name
    yield f"{asked.rtt_us / 1000:g} / {measured.rtt_us / 1000:.2f}"
    yield f"{asked.up.jitter_us / 1000:g} / {measured.deviation_us / 1000:.2f}"
    yield f"{100 * asked.up.loss:g} / {100 * lost:.2f}"
    yield f"{asked.up.burst_packets:g} / {burst:.2f}" if asked.up.loss else "-"
    times = " ".join(f"{each / US:.2f}" for each in measured.downloads_us)
    yield f"{times} (median {median(measured.downloads_us) / US:.2f})"
    yield " ".join(f"{each / US:.2f}" for each in measured.uploads_us)
