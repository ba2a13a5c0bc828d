"""`hypergpu job export-page`: a job's whole course as one file."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from dashboard_api.core.page_file import PageParts, page_with_recording
from dashboard_api.core.recording import RecordedJob, bounded_recording
from dashboard_api.core.wall_clock import Anchor, WallClock, journal_distance_ms
from dashboard_api.shell.accounts import payments_state
from hypergpu.clock import unix_ms
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.journal.events import NodeJoinedEvent, UpdateReceivedEvent, UpdateRejectedEvent
from hypergpu.journal.sentences import event_node
from hypergpu.user.client import ENDED, AsyncCoordinator, ConnectionTarget, JobEvent
from hypergpu.user.client.values import NodeView

RECORDING_BYTES_MOST = 700_000
"""With the page's own parts the file stays below a megabyte."""


async def export_page(target: ConnectionTarget, job: str, out: Path, page: Path) -> int:
    """Write a job as a page, or as a recording where the name ends in ``.json``.

    Args:
        target: The coordinator, and as whom it is called.
        job: Id of the job, its beginning, or its name.
        out: The file; another one is replaced.
        page: Folder of the built page.

    Returns:
        Size of the file in bytes.

    Raises:
        HyperGPUError: There is no such job, or the file cannot be written.
    """
    async with await AsyncCoordinator.open(target) as coordinator:
        job_record = await _read_job(coordinator, await coordinator.find_job(job))
    has_ended = job_record.job.phase in ENDED and job_record.events
    end_ms = job_record.events[-1][0] if has_ended else unix_ms()
    recording = bounded_recording(job_record, end_ms, RECORDING_BYTES_MOST)
    return await asyncio.to_thread(_write, out, page, recording)


def _write(out: Path, page: Path, recording: bytes) -> int:
    try:
        content = recording if out.suffix == ".json" else _page(page, recording)
        out.write_bytes(content)
    except OSError as error:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{out}: {error}") from error
    return len(content)


async def _read_job(coordinator: AsyncCoordinator, job_id: str) -> RecordedJob:
    detail = await coordinator.job(job_id)
    payments, decimals = None, 0
    if (await coordinator.spec(job_id)).pay.unit_price:
        payments, decimals = payments_state(await coordinator.ledger(job_id))
    events: list[JobEvent] = []
    async for update in coordinator.watch(job_id):
        if not isinstance(update, JobEvent):
            break  # The stream has caught up.
        events.append(update)
    distance_ms = journal_distance_ms(events)
    if distance_ms is None:
        distance_ms = unix_ms() - detail.job.at_ms
    clock = WallClock([Anchor(0, distance_ms)])
    return RecordedJob(
        address=coordinator.address,
        job=(await coordinator.job(job_id)).job,
        events=[(clock.unix_ms(event.at_ms), event) for event in events],
        nodes=_members(await coordinator.nodes(), events),
        payments=payments,
        decimals=decimals,
    )


def _members(nodes: Sequence[NodeView], events: Sequence[JobEvent]) -> list[NodeView]:
    """Nodes that joined the job, with what they did for it alone."""
    contents = [event.content for event in events if event.content is not None]
    counts = Counter((type(each), event_node(each)) for each in contents)
    return [
        replace(
            node,
            updates_accepted=counts[UpdateReceivedEvent, node.id],
            updates_rejected=counts[UpdateRejectedEvent, node.id],
        )
        for node in nodes
        if counts[NodeJoinedEvent, node.id]
    ]


def _page(folder: Path, recording: bytes) -> bytes:
    return page_with_recording(read_page_parts(folder), recording).encode("utf-8")


def read_page_parts(folder: Path) -> PageParts:
    """Parts of the built page that shows recordings; a plain one where none is built."""
    built_folder = folder / "recorded"
    if not (built_folder / "index.html").is_file():
        return PageParts()
    names = ("index.html", "page.js", "page.css")
    return PageParts(*((built_folder / name).read_text("utf-8") for name in names))
