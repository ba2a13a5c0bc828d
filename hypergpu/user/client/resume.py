"""Bulk calls that break and go on: what passes by itself, and how often it is tried."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from yarl import URL

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.part_file import Span
from hypergpu.user.client.connection import RESTARTING, CoordinatorCalls
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.authority import TLS_NAME
from hypergpu.wire.bulk_ranges import BulkBrokenError

PASSING = RESTARTING | {Reason.OFFSET_MISMATCH, Reason.DIGEST_MISMATCH}
IDLE_TRIES = 5
"""Tries in a row that move no byte before a transfer gives up."""

ReportProgress = Callable[[str, int, int], None]
"""Takes a step's name, the bytes that are done and the bytes there are; from another thread."""


def ignore(_step: str, _done: int, _total: int) -> None:
    """A report that nobody reads."""


@contextmanager
def explain_broken(calls: CoordinatorCalls, ranged: tensor_pb2.TicketRange) -> Iterator[None]:
    """Let bulk that breaks off be an error after which another try may help."""
    try:
        yield
    except (BulkBrokenError, TimeoutError) as error:
        why = str(error) or "nothing got through in time"
        if (host := URL(ranged.url, encoded=True).host) != TLS_NAME:
            detail, fix = f"the object store at {host}: {why}", "see that this machine reaches it"
            raise HyperGPUError(Reason.STORE_UNREACHABLE, detail, fix=fix) from error
        detail = f"the bulk port of the coordinator at {calls.to.address}: {why}"
        fix = "open its bulk port too, 7702 unless it was told another: hypergpu up --bulk-port"
        raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail, fix=fix) from error


def span_bytes(spans: list[Span]) -> int:
    return sum(end - start for start, end in spans)
