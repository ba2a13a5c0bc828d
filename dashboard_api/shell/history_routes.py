"""Answers from the dashboard's own history. A session reads of what its feed shows."""

from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dashboard_api.core.series import POINTS_MAX, X_AXES, Bucket, series_answer
from dashboard_api.core.state import EventLine, RoundState
from dashboard_api.shell.api import Call, Endpoint, Parameter
from dashboard_api.shell.comparisons import read_comparisons
from dashboard_api.shell.failures import RequestRefusedError, json_response
from dashboard_api.shell.history import EVENTS_MOST, EventSearch, SeriesSpan
from hypergpu.errors import Reason
from hypergpu.user.client import HyperGPUError
from hypergpu.user.client.settings import comparisons_folder
from hypergpu.wire.credentials import Role

ROUNDS_MOST = 500
NAMES_MOST = 12
AUDIT_MOST = 500


class SeriesValues(msgspec.Struct):
    """A series on the axis of its answer; null where it has no value."""

    min: list[float | None]
    max: list[float | None]
    mean: list[float | None]


class SeriesAnswer(msgspec.Struct):
    """Series on one axis, and where its places are on each."""

    x: list[int]
    at_ms: list[int]
    moved_bytes: list[int]
    round: list[int]
    series: dict[str, SeriesValues]


class RoundsAnswer(msgspec.Struct):
    """Rounds, ascending."""

    rounds: list[RoundState]


class EventsAnswer(msgspec.Struct):
    """Events, newest first."""

    events: list[EventLine]


async def require_job(call: Call) -> str:
    """A job's id from the path, of a job that the session may see.

    Raises:
        HyperGPUError: JOB_UNKNOWN.
    """
    job_id = call.path("job")
    if job_id not in (await feed_state(call))["jobs"]:
        raise HyperGPUError(Reason.JOB_UNKNOWN, f"there is no job {job_id!r}")
    return job_id


async def feed_state(call: Call) -> dict[str, Any]:
    """State of the session's feed."""
    if call.services.recording is not None:
        return call.services.recording.state
    follower = await call.services.views.follower(call.who)
    await follower.has_answered.wait()
    if follower.feed.refusal is not None:
        raise follower.feed.refusal
    return follower.projection.state


async def own_nodes(call: Call) -> tuple[str, ...] | None:
    """Nodes that a node's owner sees; None: the session sees all. The history holds everything."""
    if call.session is None or not call.session.is_node_owner:
        return None
    return tuple((await feed_state(call))["nodes"])


async def tell_series(call: Call) -> Response:
    """Series of a job."""
    return await _series(call, f"job/{await require_job(call)}", "loss,metric")


async def tell_node_history(call: Call) -> Response:
    """Series of a node's readings."""
    node_id = call.path("node")
    if node_id not in (await feed_state(call))["nodes"]:
        raise HyperGPUError(Reason.NODE_UNKNOWN, f"there is no node {node_id!r}")
    return await _series(call, f"node/{node_id}", "rtt_us")


async def _series(call: Call, scope: str, names: str) -> Response:
    series_names = [each for each in call.text("names", names).split(",") if each]
    if len(series_names) > NAMES_MOST:
        raise RequestRefusedError(400, f"over {NAMES_MOST} names", "ask for fewer at once")
    x = call.text("x", "time")
    if x not in X_AXES:
        raise RequestRefusedError(400, f"x is {x!r}", f"give one of {', '.join(X_AXES)}")
    points = call.whole("points", 2_000, most=POINTS_MAX)
    first, last = call.whole("from", 0), call.whole("to", -1)

    def read() -> dict[str, list[Bucket]]:
        span = SeriesSpan(scope, "", points, first, None if last < 0 else last)
        return {
            name: call.services.history.series(msgspec.structs.replace(span, name=name))
            for name in dict.fromkeys(series_names)
        }

    return json_response(series_answer(await run_in_threadpool(read), x))


async def tell_rounds(call: Call) -> Response:
    """Rounds of a job, also those that the feed has let go of."""
    job_id = await require_job(call)
    first = call.whole("from", 0)
    last = min(call.whole("to", first + ROUNDS_MOST - 1), first + ROUNDS_MOST - 1)
    bodies = await run_in_threadpool(call.services.history.rounds, job_id, first, last)
    own = await own_nodes(call)
    if own is None:
        return json_response({"rounds": [msgspec.Raw(body) for body in bodies]})
    rounds = [msgspec.json.decode(body) for body in bodies]
    for each in rounds:
        each["lanes"] = {node: lane for node, lane in each["lanes"].items() if node in own}
    return json_response({"rounds": rounds})


async def tell_events(call: Call) -> Response:
    """Events of a job by text and kind."""
    job_id = await require_job(call)
    before = call.whole("before", -1)
    search = EventSearch(
        job_id,
        call.text("query"),
        call.text("kind", most=64),
        None if before < 0 else before,
        call.whole("limit", 100, most=EVENTS_MOST),
        await own_nodes(call),
    )
    return json_response({"events": await run_in_threadpool(call.services.history.events, search)})


async def tell_audit(call: Call) -> Response:
    """The newest actions; an operator's to read."""
    if call.who.role is not Role.OPERATOR:
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, "the audit log is for operators")
    limit = call.whole("limit", 100, most=AUDIT_MOST)
    return json_response({"actions": await run_in_threadpool(call.services.history.audit, limit)})


async def tell_comparisons(call: Call) -> Response:
    """Results of `hypergpu compare`."""
    folder = call.services.settings.comparisons or comparisons_folder()
    return json_response({"comparisons": await run_in_threadpool(read_comparisons, folder)})


_SPAN = (
    Parameter("names", "Series, divided by commas."),
    Parameter("x", f"One of {', '.join(X_AXES)}.", default="time"),
    Parameter("points", "Most buckets.", "integer", maximum=POINTS_MAX, default="2000"),
    Parameter("from", "First index: a round, or ten seconds since 1970 of a node.", "integer"),
    Parameter("to", "Last index.", "integer"),
)
HISTORY_ENDPOINTS = (
    Endpoint(
        "GET",
        "/jobs/{job}/series",
        tell_series,
        "Series of a job with least, greatest and mean of each bucket.",
        _SPAN,
        result=SeriesAnswer,
        for_node_owners=True,
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/rounds",
        tell_rounds,
        f"Rounds of a job, at most {ROUNDS_MOST}.",
        (
            Parameter("from", "First round.", "integer"),
            Parameter("to", "Last round.", "integer"),
        ),
        result=RoundsAnswer,
        for_node_owners=True,
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/events",
        tell_events,
        "Events of a job, newest first.",
        (
            Parameter("query", "Part of the text."),
            Parameter("kind", "Kind of the event."),
            Parameter("before", "Only lower sequence numbers.", "integer"),
            Parameter("limit", "Most events.", "integer", maximum=EVENTS_MOST, default="100"),
        ),
        result=EventsAnswer,
        for_node_owners=True,
    ),
    Endpoint(
        "GET",
        "/nodes/{node}/history",
        tell_node_history,
        "Readings of a node over time.",
        _SPAN,
        result=SeriesAnswer,
        for_node_owners=True,
    ),
    Endpoint(
        "GET",
        "/audit",
        tell_audit,
        "The newest actions, for operators.",
        (Parameter("limit", "Most actions.", "integer", maximum=AUDIT_MOST, default="100"),),
    ),
    Endpoint("GET", "/comparisons", tell_comparisons, "Results of `hypergpu compare`."),
)
