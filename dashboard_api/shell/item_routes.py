"""What items of a farm job came to. The coordinator is asked with the session's own token, tells it
to the job's owner and operators alone, and nothing of it is kept here.
"""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dashboard_api.shell.api import Call, Endpoint, Parameter
from dashboard_api.shell.failures import RequestRefusedError, json_response
from dashboard_api.shell.history_routes import require_job
from hypergpu.errors import Reason
from hypergpu.farm.bundle_results import read_json_results, read_vector_results
from hypergpu.farm.map_request import ResultEncoding
from hypergpu.user.client import AsyncCoordinator, HyperGPUError
from hypergpu.user.client.bundles import ResultView
from hypergpu.user.farm.item_rules import ITEM_RULES

ROWS_MOST = 500
RESULT_BYTES_MOST = 16 << 20
_RESULTS_MOST = 500
_NUMBERS_SHOWN = 8
_TEXT_LENGTH_MOST = 2_000


class ItemRow(msgspec.Struct):
    """An item's value, shortened for people, or why it has none."""

    item: int
    """Its position."""
    node: str
    value: Any = None
    error: str = ""


class ItemsAnswer(msgspec.Struct):
    """Some items, in order of their positions."""

    item_kind: str
    rows: list[ItemRow]


async def tell_items(call: Call) -> Response:
    """Items of the newest results of a job."""
    job_id = await require_job(call)
    follower = await call.services.views.follower(call.who)
    await follower.has_answered.wait()
    farm = follower.projection.state["jobs"][job_id]["farm"]
    if farm is None or follower.coordinator is None:
        raise HyperGPUError(Reason.JOB_UNKNOWN, f"{job_id} is no job of items")
    if farm["item_kind"] not in ITEM_RULES:
        detail = f"the values of {farm['item_kind']} are unknown to this page's version"
        raise RequestRefusedError(409, detail, "upgrade the page's server")
    results_most = call.whole("results", 1, most=_RESULTS_MOST)
    bundle_count = sum(node["bundles"] for node in farm["nodes"].values())
    first = max(0, bundle_count - results_most)
    view = await follower.coordinator.results(job_id, first)
    rows: list[ItemRow] = []
    rows_most = call.whole("rows", ROWS_MOST, most=ROWS_MOST)
    for result in reversed(view.results[-results_most:]):
        if len(rows) >= rows_most:
            break
        rows += await _rows(follower.coordinator, job_id, farm["item_kind"], result)
    shown_rows = sorted(rows[:rows_most], key=lambda row: row.item)
    return json_response(msgspec.to_builtins(ItemsAnswer(farm["item_kind"], shown_rows)))


async def _rows(
    coordinator: AsyncCoordinator, job_id: str, item_kind: str, result: ResultView
) -> list[ItemRow]:
    if result.size_bytes > RESULT_BYTES_MOST:
        error = f"its result has {result.size_bytes} bytes: too many to show"
        return [ItemRow(result.start, result.node, error=error)]
    with tempfile.TemporaryDirectory(prefix="hypergpu-page-") as folder:
        target = Path(folder) / "result"
        await coordinator.fetch_result(job_id, result, target)
        return await run_in_threadpool(_result_rows, item_kind, result, target.read_bytes())


def _result_rows(item_kind: str, result: ResultView, content: bytes) -> list[ItemRow]:
    if ITEM_RULES[item_kind].encoding is ResultEncoding.SAFETENSORS:
        arrays = read_vector_results(content, result.items)
        vectors = (values.reshape(-1) for values in arrays.values)
        values: list[Any] = [
            {"numbers": vector[:_NUMBERS_SHOWN].tolist(), "count": len(vector)}
            for vector in vectors
        ]
        errors = dict(arrays.errors)
    else:
        items = read_json_results(content, result.items)
        values = [_shorten(item.value) for item in items]
        errors = {place: item.error for place, item in enumerate(items) if item.error}
    return [
        ItemRow(result.start + place, result.node, error=errors[place])
        if place in errors
        else ItemRow(result.start + place, result.node, value)
        for place, value in enumerate(values)
    ]


def _shorten(value: Any) -> Any:
    """A value whose texts are cut, but for pictures."""
    if isinstance(value, str):
        return value if len(value) <= _TEXT_LENGTH_MOST else f"{value[:_TEXT_LENGTH_MOST]} ..."
    if isinstance(value, dict):
        return {key: part if key == "image" else _shorten(part) for key, part in value.items()}
    return value


ITEM_ENDPOINTS = (
    Endpoint(
        "GET",
        "/jobs/{job}/items",
        tell_items,
        "Items of the newest results of a farm job, for its owner.",
        (
            Parameter("results", "Most results.", "integer", maximum=_RESULTS_MOST, default="1"),
            Parameter("rows", "Most items.", "integer", maximum=ROWS_MOST, default="500"),
        ),
        result=ItemsAnswer,
    ),
)
