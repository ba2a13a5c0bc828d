"""ServingService: what users ask of models that are served."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import structlog
from msgspec.structs import replace

from coordinator.core.serving.budget import due_units
from coordinator.core.serving.state import ServeJob
from coordinator.shell.driver.driver import Driver
from coordinator.shell.kinds.serving.open_call import RouteTold
from coordinator.shell.kinds.serving.perform import ServePerformer
from coordinator.shell.kinds.serving.ring_driver import RingDriver
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.nodes.fleet import Fleet
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.service.calls import Caller
from coordinator.shell.service.gateways import GatewayCertifier
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.serving.calls import pack_parts, scope_digest, unpack_call
from hypergpu.trust_labels import check_trust_labels
from hypergpu.v1 import serving_pb2

log = structlog.get_logger()


@dataclass(frozen=True)
class ServingServicer:
    """One method a call; `coordinator.shell.service.calls` has admitted the caller."""

    driver: Driver
    performer: ServePerformer
    fleet: Fleet
    known: KnownNodes
    certifier: GatewayCertifier

    async def list_models(
        self, _: serving_pb2.ListModelsRequest, caller: Caller
    ) -> serving_pb2.ListModelsResponse:
        return serving_pb2.ListModelsResponse(
            models=[self._model_message(runtime) for runtime in self._callable(caller)]
        )

    async def answer(
        self, request: serving_pb2.AnswerRequest, caller: Caller
    ) -> AsyncIterator[serving_pb2.AnswerResponse]:
        runtime = self._model_of(caller, request.model)
        call = unpack_call(request.call)
        if call.claim is not None or call.offer is not None or call.version is not None:
            detail = "a call of a user has no claim to check, and no version of the model"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        owner = "" if caller.token is None else caller.token.token_id
        call = replace(call, prefix_scope=scope_digest(owner, call.prefix_scope))
        answer = self.performer.desk(runtime).answer(call)
        async for part in runtime.figures.observe(call, answer):
            if isinstance(part, RouteTold):
                yield serving_pb2.AnswerResponse(
                    node_id=part.node, route_reason=part.reason, fingerprint=part.fingerprint
                )
            else:
                yield serving_pb2.AnswerResponse(parts=pack_parts([part]))

    async def label_node(
        self, request: serving_pb2.LabelNodeRequest, _: Caller
    ) -> serving_pb2.LabelNodeResponse:
        node, labels = NodeId(request.node_id), frozenset(request.labels)
        check_trust_labels(labels)
        self.known.check(node)
        await asyncio.to_thread(self.driver.journal.set_trust_labels, node, labels)
        self.fleet.nodes.set_trust_labels(node, labels)
        log.info("a node's labels were changed", node=node, labels=sorted(labels))
        self.fleet.allocator.review()
        return serving_pb2.LabelNodeResponse()

    async def certify_api(
        self, request: serving_pb2.CertifyApiRequest, caller: Caller
    ) -> serving_pb2.CertifyApiResponse:
        if caller.token is None:
            raise HyperGPUError(Reason.NOT_READY, "no API can be certified yet")
        return await asyncio.to_thread(self.certifier.certify_api, caller.token.token_id, request)

    def _callable(self, caller: Caller) -> list[ServeRuntime]:
        """Models that the caller may call: its own, and an operator all of them."""
        runtimes = self.driver.runtimes_of(ServeRuntime).values()
        return [
            runtime
            for runtime in runtimes
            if runtime.job.is_served and caller.may_change(runtime.job.owner)
        ]

    def _model_of(self, caller: Caller, name: str) -> ServeRuntime:
        """The model of a name, the newest of several owners'; or of a job.

        Raises:
            HyperGPUError: JOB_UNKNOWN, the caller may call no such model.
        """
        models = self._callable(caller)
        matches = [each for each in models if name in {each.job.request.model, each.job.job_id}]
        if not matches:
            names = ", ".join(sorted(each.job.request.model for each in models)) or "none"
            detail = f"no model {name[:100]!r} is served to this token: {names}"
            raise HyperGPUError(Reason.JOB_UNKNOWN, detail, fix="hypergpu serve ls names them")
        return matches[-1]

    def _model_message(self, runtime: ServeRuntime) -> serving_pb2.ServedModel:
        job, desk = runtime.job, self.performer.desk(runtime)
        return serving_pb2.ServedModel(
            model=job.request.model,
            job_id=job.job_id,
            replicas=job.request.replicas,
            ready_replicas=desk.ready_replicas,
            open_calls=desk.open_calls,
            waiting_calls=desk.waiting_calls,
            reason=job.reason,
            tokens_most=desk.tokens_most,
            phase=job.phase.value,
            paid_units=job.paid_units,
            due_units=due_units(job) - job.paid_units,
            unit_price=str(job.request.unit_price),
            budget=str(job.request.budget),
            unit=job.request.unit.value,
            training_id="" if job.tuning is None else job.tuning.job,
            rounds=0 if job.tuning is None else job.tuning.version.round,
            follows=job.tuning is not None and job.tuning.follows,
            is_unloaded=job.is_unloaded,
            idle_ms=job.request.idle_ms,
            tokens_per_s=runtime.figures.recent_tokens.per_s(time.monotonic()),
            stages=_stage_messages(job, desk.ring_drivers),
        )


def _stage_messages(job: ServeJob, rings: Sequence[RingDriver]) -> list[serving_pb2.ServedStage]:
    """Stages of rings one after another, in their order; none: the model is held whole."""
    ready_nodes = {seat.node for ring in rings for seat in ring.seats}
    stages = [
        (each.ring, each.span, node) for node, each in job.stages.items() if each.span is not None
    ]
    return [
        serving_pb2.ServedStage(
            node_id=node,
            first_layer=span.first,
            end_layer=span.end,
            is_ready=node in ready_nodes,
            layer_us=rings[number].layer_us.get(node, 0.0),
            ring=number,
        )
        for number, span, node in sorted(stages)
    ]
