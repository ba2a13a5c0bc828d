"""Report of a node's daemon on itself: the file that `hypergpu status` shows on the same machine.

Pure values. Times are milliseconds since 1970 by the machine's clock. Fields are only added.
"""

import msgspec

REPORT_FILE = "report.json"
"""Its name in the node's folder."""
DEVICE_FOLDER = "device-{}"
"""In a machine's folder, that of another device's node, by the device's number."""
DEVICE_FOLDERS = DEVICE_FOLDER.format("*")
REPORT_EVERY_MS = 60_000
"""A daemon writes it at least so often, also when nothing has changed."""
SILENT_AFTER_MS = 100_000
"""One that is older is overdue, also on a machine whose disk is slow."""

RUNNING = "running"
DRAINING = "draining"
UNHEALTHY = "unhealthy"
"""No worker gets ready, so the node takes no work."""
WITHHELD = "withheld"
"""Its owner's limits let it do nothing at the moment."""
FAILED = "failed"
"""The daemon ended by an error."""
SILENT = "silent"
"""The process is there and has reported nothing for a while. Only readers say so."""
DIED = "died"
"""The process is gone without a last word. Only readers say so."""
ALIVE = frozenset({RUNNING, DRAINING, UNHEALTHY, WITHHELD})


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The connection to the coordinator."""

    coordinator: str | None = None
    """``host:port``; None before the node has joined."""
    state: str
    """A `gpu_node.core.session_state.LinkPhase`."""
    since_ms: int
    reason: str = ""
    """Why it is not connected."""
    retry_at_ms: int | None = None
    round_trip_us: int | None = None
    """Least of the newest ten."""
    longest_round_trip_us: int | None = None
    up_bits_per_s: float | None = None
    """Goodput of the newest measured transfer to the coordinator."""
    down_bits_per_s: float | None = None


class WorkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The work at hand."""

    job: str
    round: int
    """Counts from 0."""
    workload: str
    phase: str
    """``download``, ``train``, ``encode``, ``upload`` or ``wait``."""
    since_ms: int
    """Begin of the phase."""
    reason: str = ""
    """Why it waits."""
    plan: str = ""
    """The coordinator's reason for this part of the round."""
    steps_done: int
    steps_total: int
    """0: the work is of a kind other than training, without rounds and inner steps."""
    batch_size: int
    loss: float | None = None
    update_bytes: int | None = None
    """Size of the finished update."""
    moved_bytes: int = 0
    """Bytes of the download or the upload so far."""
    waiting_jobs: int = 0
    """Other jobs whose work waits for this one's end."""


class SetbackReport(msgspec.Struct, frozen=True, kw_only=True):
    """A round in which the node's work did not count."""

    at_ms: int
    job: str
    round: int
    """Counts from 0."""
    kind: str
    """``rejected``, ``late``, ``cancelled`` or ``handed back``."""
    reason: str


class JudgementReport(msgspec.Struct, frozen=True, kw_only=True):
    """An update that does not count in full, or is not paid in full."""

    at_ms: int
    job: str
    reason: str
    """Its round, how much of it counts and is paid, and why."""


class WorkTotals(msgspec.Struct, frozen=True):
    """Outcomes of the node's work since the daemon's start."""

    accepted: int = 0
    samples: int = 0
    """Samples of the accepted updates."""
    rejected: int = 0
    late: int = 0
    cancelled: int = 0
    """Work that the coordinator took back, because a round closed or another node has it."""
    handed_back: int = 0


class EarnedUnits(msgspec.Struct, frozen=True):
    """Work in one unit, by the newest receipt of each job that counts in it."""

    unit: str
    """Name of a `hypergpu.work_units.WorkUnit`."""
    credited: int = 0
    """In jobs that a chain settles."""
    unpaid: int = 0
    """In jobs that pay nothing."""


class EarnedReport(msgspec.Struct, frozen=True):
    """Sums over the newest receipt of each job that the node holds, of earlier starts too."""

    receipts: int = 0
    credited_samples: int = 0
    """Samples weighted by quality, in jobs that a chain settles."""
    unpaid_samples: int = 0
    """The same in jobs that pay nothing."""
    by_unit: tuple[EarnedUnits, ...] = ()
    """Accepted work in units other than samples."""


class LimitsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that the owner has set; 0: none."""

    worker_threads: int = 0
    worker_memory_bytes: int = 0
    worker_step_floor_ms: int = 0
    cache_bytes: int = 0
    drain_limit_ms: int = 0
    kinds: tuple[str, ...] = ()
    """Kinds of work that the owner allows; none: the daemon is older, and does training alone."""


class NodeReport(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/status/1"
):
    """`status`: a node of this machine."""

    node: str
    name: str
    state: str
    """RUNNING, DRAINING, UNHEALTHY or WITHHELD; FAILED or a `gpu_node.core.commands.Departure` once
    it has ended; SILENT or DIED.
    """
    reason: str = ""
    """Why the state is not RUNNING."""
    process_id: int
    started_at_ms: int
    at_ms: int
    """Time of the report."""
    device: str = ""
    link: LinkReport
    work: WorkReport | None = None
    """None: it waits for work."""
    totals: WorkTotals = WorkTotals()
    setbacks: tuple[SetbackReport, ...] = ()
    """The newest, in order of time."""
    judgements: tuple[JudgementReport, ...] = ()
    """The same of updates that were weighed."""
    earned: EarnedReport = EarnedReport()
    limits: LimitsReport = LimitsReport()
    sandbox: str = ""
    """Sandbox of the worker: ``bwrap``, ``landlock``, or ``unsandboxed`` with reason and fix."""
    state_dir: str
    log: str | None = None
    """Path of the log; None: it goes to the daemon's standard error."""
    page: str | None = None
    """Address of this node on the page; None: it is not known."""
    idle: tuple[str, ...] = ()
    """Why it has no work, a sentence for each kind that jobs wait with; none: no job waits, or it
    has work.
    """
    others: "tuple[NodeReport, ...]" = ()
    """Nodes of the machine's other devices, which one process runs. Only readers add them."""


def judge_report(report: NodeReport, now_ms: int, *, is_alive: bool) -> NodeReport:
    """The report with the state that a reader finds.

    Args:
        report: The newest one.
        now_ms: Time of reading.
        is_alive: Whether the process that wrote it is there.
    """
    if report.state not in ALIVE:
        return report
    if not is_alive:
        reason = f"process {report.process_id} is gone and said no last word"
        return msgspec.structs.replace(report, state=DIED, reason=reason)
    if abs(now_ms - report.at_ms) > SILENT_AFTER_MS:
        reason = f"process {report.process_id} is suspended, or its disk does not take reports"
        return msgspec.structs.replace(report, state=SILENT, reason=reason)
    return report
