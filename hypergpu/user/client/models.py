"""Calls of served models: a job keeps a model on nodes, and calls to it are answered."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import msgspec

from hypergpu.packed_work import pack_work
from hypergpu.serving.calls import AnswerPart, ModelCall, pack_call, unpack_parts
from hypergpu.serving.serve_request import SERVE_KIND, ServeRequest
from hypergpu.user.client.connection import CoordinatorCalls
from hypergpu.v1 import job_pb2, serving_pb2
from hypergpu.wire.work import work_message

_ANSWER_TIMEOUT_S = 24 * 3600.0
"""An answer may be long, and its caller may end it at any time."""


class ServedStageView(msgspec.Struct, frozen=True):
    """A node that holds some layers of a model."""

    node: str
    first_layer: int
    end_layer: int
    """The layer behind its last one."""
    is_ready: bool
    """Whether they are loaded."""
    layer_us: float
    """Time of a token in a layer, as the node measured it; 0: not known."""
    ring: int = 0
    """The ring that it is of, from 0 on, where a training has several."""


class ServedModelView(msgspec.Struct, frozen=True):
    """A model that this token may call."""

    model: str
    """Name that calls ask for."""
    job: str
    phase: str
    replicas: int
    """Nodes that are to hold it."""
    ready_replicas: int
    """Nodes that hold it and answer."""
    open_calls: int
    waiting_calls: int
    tokens_most: int
    """Tokens of a prompt and its answer at most; 0: no replica has said."""
    reason: str
    paid_units: int = 0
    """Units of accepted counts: see `hypergpu.token_counts`."""
    due_units: int = 0
    """Units of counts whose nodes have not signed them yet."""
    unit_price: str = "0"
    """Price of 100 units, in the smallest unit of money; ``0``: no money is due."""
    budget: str = "0"
    """The most that it may cost."""
    training: str = ""
    """The training whose model it is; empty: it is no training's."""
    rounds: int = 0
    """Rounds of the training after which its model is."""
    follows: bool = False
    """Whether its nodes take each round's model."""
    is_unloaded: bool = False
    """Whether nodes let go of it, as nobody called: the next call has it loaded again."""
    idle_ms: int = 0
    """Time without a call after which nodes let go of it; 0: they never do."""
    tokens_per_s: float = 0.0
    """Tokens of answers a second, in the last ten seconds."""
    stages: tuple[ServedStageView, ...] = ()
    """Nodes that hold some of its layers each; none: each replica holds it whole."""
    unit: str = "tokens"
    """What its work is counted in: ``tokens``, or ``layer-tokens`` of a model in stages."""


class ApiCertificate(NamedTuple):
    """What an API of served models presents to its callers."""

    certificate_pem: bytes
    authority_pem: bytes
    """The CA's certificate, which callers trust."""
    expires_unix_s: int


class AnswerRoute(NamedTuple):
    """The node that answers from here on."""

    node: str
    reason: str
    """Why that one."""
    fingerprint: str
    """Digest of weights, type and libraries, with the device: equal ones answer alike."""


def serve_job_request(request: ServeRequest, request_id: str) -> job_pb2.CreateJobRequest:
    """The call that creates the job of a served model.

    Raises:
        HyperGPUError: REQUEST_INVALID, the request is not right.
    """
    request.check()
    work = work_message(pack_work(SERVE_KIND, request))
    return job_pb2.CreateJobRequest(work=work, request_id=request_id)


async def list_models(calls: CoordinatorCalls) -> list[ServedModelView]:
    """Models that the token may call."""
    answer = await calls.call(calls.serving.ListModels, serving_pb2.ListModelsRequest())
    return [
        ServedModelView(
            each.model,
            each.job_id,
            each.phase,
            each.replicas,
            each.ready_replicas,
            each.open_calls,
            each.waiting_calls,
            each.tokens_most,
            each.reason,
            each.paid_units,
            each.due_units,
            each.unit_price or "0",
            each.budget or "0",
            each.training_id,
            each.rounds,
            each.follows,
            each.is_unloaded,
            each.idle_ms,
            each.tokens_per_s,
            tuple(
                ServedStageView(
                    stage.node_id,
                    stage.first_layer,
                    stage.end_layer,
                    stage.is_ready,
                    stage.layer_us,
                    stage.ring,
                )
                for stage in each.stages
            ),
            each.unit or "tokens",
        )
        for each in answer.models
    ]


async def answer(
    calls: CoordinatorCalls, model: str, call: ModelCall
) -> AsyncIterator[AnswerRoute | AnswerPart]:
    """The parts of an answer as they come, with the node that gives them.

    Raises:
        HyperGPUError: The call is not right, no such model is served, or it is not free in time.
    """
    call.check()
    request = serving_pb2.AnswerRequest(model=model, call=pack_call(call))
    async for message in calls.stream(calls.serving.Answer, request, _ANSWER_TIMEOUT_S):
        if message.node_id:
            yield AnswerRoute(message.node_id, message.route_reason, message.fingerprint)
        if message.parts:
            for part in unpack_parts(message.parts):
                yield part


async def label_node(calls: CoordinatorCalls, node_id: str, labels: Sequence[str]) -> None:
    """Give a node labels in place of those before, which served models may ask for."""
    request = serving_pb2.LabelNodeRequest(node_id=node_id, labels=labels)
    await calls.call(calls.serving.LabelNode, request)


async def certify_api(
    calls: CoordinatorCalls, request_pem: bytes, hosts: Sequence[str]
) -> ApiCertificate:
    """A certificate of the coordinator's CA for the TLS key of an API of served models."""
    request = serving_pb2.CertifyApiRequest(certificate_request=request_pem, hosts=hosts)
    issued_chain = await calls.call(calls.serving.CertifyApi, request)
    return ApiCertificate(
        issued_chain.certificate, issued_chain.authority, issued_chain.certificate_expires_unix_s
    )
