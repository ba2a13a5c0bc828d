"""Steering: each call acts with the session's own token, and the coordinator decides."""

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from dashboard_api.shell.api import Call, Endpoint, Parameter
from dashboard_api.shell.failures import RequestRefusedError, json_response
from hypergpu.jobfile.keys import SETTABLE
from hypergpu.jobfile.notes import submit_note
from hypergpu.jobfile.reading import parse_job, parse_job_table, with_parameters
from hypergpu.jobfile.spec import JobSpec
from hypergpu.jobfile.toml import JobFileError, KeyLines
from hypergpu.user.client import AsyncCoordinator
from hypergpu.user.client.forecasts import ForecastRangeView, JobForecastView
from hypergpu.workloads.registry import entries

WHICH = ("latest", "best")


class JobRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A new job: the text of a job file, or its settings as a tree; with an upload's id or not."""

    toml: str = ""
    settings: dict[str, Any] = {}
    upload: str = ""
    request_id: str = ""
    """Requests with the same id make one job."""
    preview: bool = False
    """Whether the settings are only checked."""


class JobMade(msgspec.Struct):
    """A job that was created; of a preview the settings alone."""

    job: str
    spec: dict[str, Any]
    note: str
    """How its rounds, samples and escrow are counted, in one line; empty: as the settings say."""


class ForecastCost(msgspec.Struct):
    """An amount with its range, in the smallest units of the token, as decimal digits."""

    low: str
    middle: str
    high: str


class ForecastAnswer(msgspec.Struct):
    """What a job takes: middles, and a range that eight of ten jobs are within."""

    left_ms: ForecastRangeView
    """From now until its end."""
    bytes_up: ForecastRangeView
    bytes_down: ForecastRangeView
    cost: ForecastCost | None
    """None: the job pays nothing."""
    escrow: str
    samples: int
    rounds: int
    nodes: int
    measured_nodes: int
    """Nodes whose speed was measured."""
    reason: str
    """What it is based on, for people."""


class JobForecastAnswer(msgspec.Struct):
    """A running job's forecast; None where nothing can be said."""

    forecast: ForecastAnswer | None


class ParametersRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Changes by dotted key or short name."""

    set: dict[str, str | int | float | bool]
    preview: bool = False


class ParameterLine(msgspec.Struct):
    """A setting that a running job takes changes of."""

    key: str
    meaning: str


class SettableAnswer(msgspec.Struct):
    """Every such setting, by section."""

    parameters: list[ParameterLine]


class ParameterChange(msgspec.Struct):
    """A setting before and after."""

    key: str
    before: Any
    after: Any


class ParametersAnswer(msgspec.Struct):
    """What changes from the next round on."""

    changes: list[ParameterChange]
    is_done: bool


class DoneAnswer(msgspec.Struct):
    """The coordinator did it."""

    done: bool = True


class WorkloadOption(msgspec.Struct):
    """A setting of a workload."""

    name: str
    default: str | int | float | bool
    meaning: str
    minimum: float | None
    maximum: float | None


class WorkloadLine(msgspec.Struct):
    """A workload of the catalogue."""

    name: str
    meaning: str
    dataset: str
    kind: str
    metric: str
    takes_data: str
    options: list[WorkloadOption]


class WorkloadsAnswer(msgspec.Struct):
    """The catalogue."""

    workloads: list[WorkloadLine]


async def tell_workloads(_call: Call) -> Response:
    """The catalogue of this machine, but for programs, which only `hypergpu.train` can write."""
    lines = []
    for each in entries():
        if each.name == "program":
            continue
        options = [
            WorkloadOption(one.name, one.default, one.meaning, one.minimum, one.maximum)
            for one in each.options
        ]
        about = (each.name, each.meaning, each.dataset, each.kind, each.metric, each.takes_data)
        lines.append(WorkloadLine(*about, options))
    return json_response(WorkloadsAnswer(lines))


async def tell_settable(_call: Call) -> Response:
    """What a running job takes changes of."""
    lines = [ParameterLine(key, meaning) for key, meaning in SETTABLE.items()]
    return json_response(SettableAnswer(lines))


async def create_job(call: Call) -> Response:
    """Check the settings and create the job."""
    request = await call.body(JobRequest)
    folder = await _data_folder(call, request.upload)
    spec = _spec(request, folder)
    tree: dict[str, Any] = msgspec.to_builtins(spec)
    if request.preview:
        return json_response(JobMade("", tree, submit_note(spec)))
    coordinator = await call.services.coordinator(call.who)
    job_id = await coordinator.submit(spec, beside=folder, request_id=request.request_id[:64])
    return json_response(JobMade(job_id, tree, submit_note(spec)), 201)


async def estimate_job(call: Call) -> Response:
    """Say what a job would take with the nodes that are there; nothing is created."""
    request = await call.body(JobRequest)
    folder = await _data_folder(call, request.upload)
    coordinator = await call.services.coordinator(call.who)
    return json_response(forecast_answer(await coordinator.estimate(_spec(request, folder))))


async def tell_forecast(call: Call) -> Response:
    """Say what a job still takes."""
    coordinator = await call.services.coordinator(call.who)
    detail = await coordinator.job(call.path("job"), wants_forecast=True)
    answer = None if detail.forecast is None else forecast_answer(detail.forecast)
    return json_response(JobForecastAnswer(answer))


def forecast_answer(found: JobForecastView) -> ForecastAnswer:
    """A forecast as the page reads it."""
    cost = found.cost
    return ForecastAnswer(
        left_ms=found.left_ms,
        bytes_up=found.bytes_up,
        bytes_down=found.bytes_down,
        cost=None
        if cost is None
        else ForecastCost(str(cost.low), str(cost.middle), str(cost.high)),
        escrow=str(found.escrow),
        samples=found.samples,
        rounds=found.rounds,
        nodes=found.nodes,
        measured_nodes=found.measured_nodes,
        reason=found.reason,
    )


async def _data_folder(call: Call, upload_id: str) -> Path | None:
    if not upload_id:
        return None
    upload = call.services.uploads.find(upload_id, call.who.key)
    return await run_in_threadpool(call.services.uploads.data_folder, upload)


def _spec(wanted: JobRequest, folder: Path | None) -> JobSpec:
    """Settings of a new job; its data are those that were uploaded, never this machine's."""
    data_path = str(folder) if folder else ""
    try:
        spec = (
            parse_job(wanted.toml, data_path=data_path)
            if wanted.toml
            else parse_job_table(wanted.settings, KeyLines("settings"), data_path=data_path)
        )
    except JobFileError as wrong:
        raise RequestRefusedError(
            400, str(wrong), "see docs/jobs.md for what each setting takes"
        ) from wrong
    if spec.data.path and folder is None:
        message = "data.path names a folder of your machine, which this page cannot read"
        raise RequestRefusedError(400, message, "upload the data and leave data.path out")
    return spec


def _job_act(act: Callable[[AsyncCoordinator, str], Awaitable[None]]) -> Callable[[Call], Any]:
    async def answer(call: Call) -> Response:
        await act(await call.services.coordinator(call.who), call.path("job"))
        return json_response(DoneAnswer())

    return answer


def _node_act(act: Callable[[AsyncCoordinator, str], Awaitable[None]]) -> Callable[[Call], Any]:
    async def answer(call: Call) -> Response:
        await act(await call.services.coordinator(call.who), call.path("node"))
        return json_response(DoneAnswer())

    return answer


async def set_parameters(call: Call) -> Response:
    """Change settings of a job, or say what would change."""
    request, job_id = await call.body(ParametersRequest), call.path("job")
    coordinator = await call.services.coordinator(call.who)
    changes = {key: msgspec.json.encode(value).decode() for key, value in request.set.items()}
    before = await coordinator.spec(job_id)
    try:
        after = with_parameters(before, changes)
    except JobFileError as wrong:
        raise RequestRefusedError(
            400, str(wrong), "see docs/jobs.md for what each setting takes"
        ) from wrong
    if not request.preview:
        await coordinator.set_parameters(job_id, changes)
    answer = ParametersAnswer(spec_changes(before, after), not request.preview)
    return json_response(answer)


def spec_changes(before: JobSpec, after: JobSpec) -> list[ParameterChange]:
    """Settings that differ, by dotted key."""
    one, other = _flat(msgspec.to_builtins(before)), _flat(msgspec.to_builtins(after))
    return [
        ParameterChange(key, one.get(key), value)
        for key, value in other.items()
        if one.get(key) != value
    ]


def _flat(tree: dict[str, Any], beginning: str = "") -> dict[str, Any]:
    flat_values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{beginning}{key}"
        flat_values |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat_values


async def export_model(call: Call) -> Response:
    """The model as a safetensors file."""
    which = call.text("which", "latest")
    if which not in WHICH:
        raise RequestRefusedError(400, f"which is {which!r}", "give latest or best")
    coordinator, job_id = await call.services.coordinator(call.who), call.path("job")
    folder = tempfile.TemporaryDirectory(prefix="hypergpu-export-")
    try:
        exported_model = await coordinator.export(job_id, Path(folder.name) / "model", which=which)
    except BaseException:
        folder.cleanup()
        raise
    name = f"{job_id}-{which}.safetensors"
    clean_up = BackgroundTask(folder.cleanup)
    return FileResponse(exported_model.model, filename=name, background=clean_up)


def _job_endpoint(
    word: str, act: Callable[[AsyncCoordinator, str], Awaitable[None]], meaning: str
) -> Endpoint:
    return Endpoint("POST", f"/jobs/{{job}}/{word}", _job_act(act), meaning, result=DoneAnswer)


def _node_endpoint(
    word: str, act: Callable[[AsyncCoordinator, str], Awaitable[None]], meaning: str
) -> Endpoint:
    return Endpoint("POST", f"/nodes/{{node}}/{word}", _node_act(act), meaning, result=DoneAnswer)


def _own_node_endpoint(
    word: str, act: Callable[[AsyncCoordinator, str], Awaitable[None]], meaning: str
) -> Endpoint:
    return _node_endpoint(word, act, meaning)._replace(for_node_owners=True)


CONTROL_ENDPOINTS = (
    Endpoint(
        "GET",
        "/workloads",
        tell_workloads,
        "Workloads with their options.",
        result=WorkloadsAnswer,
    ),
    Endpoint(
        "GET",
        "/parameters",
        tell_settable,
        "Settings that a running job takes changes of.",
        result=SettableAnswer,
    ),
    Endpoint(
        "POST",
        "/jobs",
        create_job,
        "Create a job, or check its settings.",
        body=JobRequest,
        result=JobMade,
    ),
    Endpoint(
        "POST",
        "/estimates",
        estimate_job,
        "Say what a job would take; nothing is created.",
        body=JobRequest,
        result=ForecastAnswer,
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/forecast",
        tell_forecast,
        "Say what a job still takes.",
        result=JobForecastAnswer,
    ),
    _job_endpoint("pause", AsyncCoordinator.pause, "Pause a job now; what was accepted stays."),
    _job_endpoint("resume", AsyncCoordinator.resume, "Go on with a paused job."),
    _job_endpoint("stop", AsyncCoordinator.stop, "Stop a job with the model there is."),
    Endpoint(
        "POST",
        "/jobs/{job}/parameters",
        set_parameters,
        "Change settings from the next round on, or say what would change.",
        body=ParametersRequest,
        result=ParametersAnswer,
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/export",
        export_model,
        "The model as a safetensors file.",
        (Parameter("which", "latest or best.", default="latest"),),
        result=bytes,
    ),
    _own_node_endpoint(
        "pause", AsyncCoordinator.pause_node, "Pause a node and take its work back."
    ),
    _own_node_endpoint(
        "resume", AsyncCoordinator.resume_node, "Let a paused node take work again."
    ),
    _own_node_endpoint(
        "drain", AsyncCoordinator.drain, "Let a node finish what it holds and leave."
    ),
    _node_endpoint("exclude", AsyncCoordinator.revoke_node, "Shut a node out at once."),
    _node_endpoint("readmit", AsyncCoordinator.readmit_node, "Admit a node again."),
)
