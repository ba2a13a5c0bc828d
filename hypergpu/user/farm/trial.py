"""Tries the first items of a farm job on one node, and looks at what all of them would take."""

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import PRICED_UNITS, work_kind
from hypergpu.user.client import Coordinator
from hypergpu.user.farm.starting import MapOrder, prepare_map, start_map
from hypergpu.user.terminal.item_progress import item_progress
from hypergpu.work_units import WorkUnit

_SAMPLE_ROWS = 3


class MapTrial(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/map-trial/1"):
    """`map --limit`: what the first items took on one node."""

    job: str
    items: int
    errors: int
    seconds: float
    """From the job's creation to its last result, the base's way to the node included."""
    units: int
    unit: str
    cost: str
    """In the smallest unit of money."""
    sample: list[dict[str, Any]]
    """The first rows of the output."""


class MapEstimate(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/map-estimate/1"):
    """`map --estimate`: what is known before anything is sent."""

    items: int
    rows_refused: int
    """Rows that cannot become items."""
    send_bytes: int
    """Size of items, base and program; what the coordinator holds is not sent again."""
    unit: str
    cost: str | None
    """In the smallest unit of money; null: it follows from tokens, which nodes count."""
    nodes: int | None
    """Connected nodes that do such items; null: the token may not list nodes."""


def try_map(coordinator: Coordinator, order: MapOrder) -> MapTrial:
    """Do the first items on one node, in a job of their own; no output is written.

    Args:
        coordinator: An open connection.
        order: With a limit.

    Raises:
        HyperGPUError: As `hypergpu.map`, or the job does not succeed.
    """
    settings = msgspec.structs.replace(order.settings, nodes=1, checks=0.0)
    with tempfile.TemporaryDirectory(prefix="hypergpu-") as folder:
        out = Path(folder) / "trial.jsonl"
        run = start_map(coordinator, order._replace(settings=settings, out=out))
        start_s = time.monotonic()
        with item_progress(f"trying {order.limit} items") as report:
            output = run.wait(report)
        seconds = time.monotonic() - start_s
        with out.open("rb") as lines:
            sample = [
                msgspec.json.decode(line)
                for _, line in zip(range(_SAMPLE_ROWS), lines, strict=False)
            ]
    bundles = coordinator.job(run.id).job.bundles
    units = bundles.units if bundles is not None else 0
    return MapTrial(
        run.id,
        output.items,
        output.errors,
        round(seconds, 1),
        units,
        settings.rules.unit.value,
        str(_cost(units, settings.unit_price)),
        sample,
    )


def _cost(units: int, price: int) -> int:
    return -(-units * price // PRICED_UNITS)


def estimate_map(coordinator: Coordinator, order: MapOrder) -> MapEstimate:
    """What a job would take; nothing is sent.

    Raises:
        HyperGPUError: Data or settings cannot be used.
    """
    order.settings.check()
    if order.settings.price and not order.settings.budget:
        # Nothing is spent: a request has a budget, and an estimate tells what it should be.
        settings = msgspec.structs.replace(order.settings, budget=order.settings.price)
        order = order._replace(settings=settings)
    with tempfile.TemporaryDirectory(prefix="hypergpu-") as folder:
        job_input = prepare_map(order, Path(folder))
        size_bytes = job_input.size_bytes
    request = job_input.request
    cost = _cost(request.items, request.unit_price)
    return MapEstimate(
        request.items,
        len(job_input.items.reasons),
        size_bytes,
        request.unit.value,
        None if request.unit is WorkUnit.TOKENS else str(cost),
        _able_nodes(coordinator, request.item_kind),
    )


def _able_nodes(coordinator: Coordinator, kind: str) -> int | None:
    try:
        nodes = coordinator.nodes()
    except HyperGPUError as error:
        if error.reason is not Reason.ROLE_FORBIDDEN:
            raise
        return None
    return sum(work_kind(kind) in node.workloads for node in nodes)
