"""What the page asks of served models: to serve a round of a training, and how one is doing."""

import uuid
from typing import Literal

import msgspec
from starlette.responses import Response

from dashboard_api.shell.api import Call, Endpoint
from dashboard_api.shell.failures import RequestRefusedError, json_response
from hypergpu.ids import JobId
from hypergpu.serving.serve_request import TUNED_KIND, ServeRequest
from hypergpu.serving.tuned_model import BEST, LATEST, TuningSource
from hypergpu.units import Milliseconds

IDLE_MS = Milliseconds(30 * 60_000)
"""Nodes let go of a model that the page had served once nobody has called it for so long."""


class ServeRoundOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model of a training is to be served."""

    which: Literal["latest", "best", "base"] = "latest"
    round: int | None = None
    """The model after so many rounds, in place of ``which``, if it is kept."""

    @property
    def name(self) -> str:
        """What its name ends with."""
        return self.which if self.round is None else f"r{self.round}"

    def source(self, job: str) -> TuningSource:
        """The same for the coordinator."""
        if self.round is None and self.which == "base":
            return TuningSource(job=JobId(job), round=0)
        which = BEST if self.which == "best" else LATEST
        return TuningSource(job=JobId(job), which=which, round=self.round)


class ServedRound(msgspec.Struct, frozen=True):
    """A job that serves it."""

    job: str


class ServedStageAnswer(msgspec.Struct, frozen=True):
    """A node's layers in a ring."""

    node: str
    first_layer: int
    end_layer: int
    """The layer behind its last one."""
    is_ready: bool
    layer_us: float
    """Time of a token in a layer; 0: not known."""
    ring: int = 0
    """The ring that it is of, from 0 on, where a training has several."""


class ServedAnswer(msgspec.Struct, frozen=True):
    """How a served model is doing."""

    open_calls: int
    waiting_calls: int
    tokens_per_s: float
    """Tokens of answers a second, in the last ten seconds."""
    stages: tuple[ServedStageAnswer, ...]
    """Ring after ring, in its order; none: each replica holds the model whole."""


async def serve_round(call: Call) -> Response:
    """Have a model of a fine-tuning served, which goes when nobody calls it."""
    order = await call.body(ServeRoundOrder)
    job = call.path("job")
    request = ServeRequest(
        model=f"{job}-{order.name}",
        files={},
        engine=TUNED_KIND,
        source=order.source(job),
        idle_ms=IDLE_MS,
    )
    coordinator = await call.services.coordinator(call.who)
    job_id = await coordinator.create_serve(request, request_id=uuid.uuid4().hex)
    return json_response(ServedRound(job_id))


async def tell_served(call: Call) -> Response:
    """Queue, pace and stages of a served model."""
    coordinator = await call.services.coordinator(call.who)
    job = call.path("job")
    for model in await coordinator.models():
        if model.job == job:
            stages = tuple(
                ServedStageAnswer(
                    each.node,
                    each.first_layer,
                    each.end_layer,
                    each.is_ready,
                    each.layer_us,
                    each.ring,
                )
                for each in model.stages
            )
            answer = ServedAnswer(model.open_calls, model.waiting_calls, model.tokens_per_s, stages)
            return json_response(answer)
    raise RequestRefusedError(404, f"{job[:100]} serves no model to this token", "see #/jobs")


SERVE_ENDPOINTS = (
    Endpoint(
        "POST",
        "/jobs/{job}/serve",
        serve_round,
        "Have a model of a fine-tuning served: its newest, its best, that of a round, or its base.",
        body=ServeRoundOrder,
        result=ServedRound,
    ),
    Endpoint(
        "GET",
        "/jobs/{job}/served",
        tell_served,
        "Queue, pace and stages of a served model, for its owner.",
        result=ServedAnswer,
    ),
)
