"""JobService and OperatorService in memory, on a real loopback port, failing where a test says."""

# ruff: noqa: N802 - the schema names the methods
import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from hypergpu.digests import digest_of, digest_to_wire
from hypergpu.ids import Digest, TokenId
from hypergpu.protocol import PROTOCOL, PROTOCOL_KEY
from hypergpu.tensors.layout import TensorKind, TensorSpec, layout_of
from hypergpu.v1 import (
    farm_pb2,
    forecast_pb2,
    job_pb2,
    job_pb2_grpc,
    node_pb2,
    payments_pb2_grpc,
    serving_pb2,
    serving_pb2_grpc,
    spec_pb2,
    tensor_pb2,
)
from hypergpu.wire.authority import TLS_NAME
from hypergpu.wire.credentials import Role, Token, token_text

Context = grpc.ServicerContext
SECRET = "s" * 32
JOB = "job-0123456789ab"
NODE = "0x" + "ab" * 20
SPEC = {"workload": "digits-softmax", "name": "first", "training": {"rounds": 4}}
CHUNK = 256
LAYOUT = layout_of(
    [
        TensorSpec("weight", (30, 10)),
        TensorSpec("bias", (9,)),
        TensorSpec("mean", (5,), TensorKind.STATISTIC),
        TensorSpec("seen", (), TensorKind.INTEGER),
    ]
)
MODEL = bytes(number % 251 for number in range(LAYOUT.model_bytes))


def operator_token(port: int) -> str:
    """A token for a coordinator without TLS on this machine."""
    address = (f"127.0.0.1:{port}",)
    return token_text(Token(address, Digest(""), Role.OPERATOR, TokenId("0" * 12), SECRET))


def refuse(context: Context, code: grpc.StatusCode, reason: str, number: int, detail: str) -> None:
    """Abort like a coordinator: a numbered reason in the status details."""
    error_info = error_details_pb2.ErrorInfo(
        reason=reason,
        domain="hypergpu",
        metadata={"number": str(number), "detail": detail, "fix": "do as the test says"},
    )
    any_detail = any_pb2.Any()
    any_detail.Pack(error_info)
    status = status_pb2.Status(code=code.value[0], message=detail, details=[any_detail])
    details = (("grpc-status-details-bin", status.SerializeToString()),)
    context.set_trailing_metadata(details)
    context.abort(code, detail)


def summary(phase: str = "training") -> job_pb2.JobSummary:
    """One job, every field set."""
    return job_pb2.JobSummary(
        job_id=JOB,
        name="first",
        phase=phase,
        reason="a round is open",
        round=2,
        rounds=4,
        nodes=1,
        loss=0.5,
        metric=float("nan"),
        metric_name="accuracy",
        bytes_up=1200,
        bytes_down=3_400_000,
        updates_accepted=2,
        updates_rejected=1,
        samples=640,
        model=tensor_pb2.Digest(value=digest_to_wire(digest_of(MODEL))),
        at_ms=12_000,
    )


def forecast() -> forecast_pb2.JobForecast:
    """What a job takes until its end, every field set."""
    return forecast_pb2.JobForecast(
        left_ms=forecast_pb2.ForecastRange(low=200_000, middle=250_000, high=400_000),
        bytes_up=forecast_pb2.ForecastRange(low=10_000, middle=12_000, high=20_000),
        bytes_down=forecast_pb2.ForecastRange(low=1_000_000, middle=1_500_000, high=2_000_000),
        cost=forecast_pb2.ForecastAmount(
            low="11", middle="12", high=str(10**25), escrow=str(10**25)
        ),
        samples=20_480,
        rounds=38,
        nodes=5,
        measured_nodes=3,
        reason="3 of 5 nodes are measured, 2 by the median",
    )


class FakeService(job_pb2_grpc.JobServiceServicer, job_pb2_grpc.OperatorServiceServicer):
    """What the command line asks, answered from memory; remembers what it was told."""

    def __init__(self) -> None:
        self.jobs = [summary()]
        self.called: list[str] = []
        self.blobs: dict[bytes, bytearray] = {}
        self.specs: list[str] = []
        self.manifests: list[tensor_pb2.Manifest] = []
        self.spec_keys: list[spec_pb2.SpecKey] = []
        self.token_id = "1" * 12
        """Id of the only token."""
        self.bulk_port = 0
        self.breaks_left = 0
        """Transfers break off after their first bytes this often."""
        self.is_away = False
        """Jobs are not told of."""
        self.offsets: list[int] = []
        """Where transfers began."""
        self.authorizations: set[str] = set()
        self.model = MODEL
        """What the store gives."""
        self.doubts = 0
        """Tickets that were asked for because an earlier one was no good."""

    def _note(self, name: str, context: Context) -> None:
        self.called.append(name)
        metadata = dict(context.invocation_metadata())
        self.authorizations.add(str(metadata.get("authorization")))
        assert metadata.get(PROTOCOL_KEY) == str(PROTOCOL)
        assert context.time_remaining() < 4000, "every call has a deadline"

    def _break(self, context: Context) -> None:
        if self.breaks_left > 0:
            self.breaks_left -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "the test broke it")

    def CreateJob(self, request: Any, context: Context) -> job_pb2.CreateJobResponse:
        self._note("CreateJob", context)
        self.specs.append(request.spec_json)
        self.manifests.append(request.manifest)
        return job_pb2.CreateJobResponse(job_id=JOB)

    def ListJobs(self, request: Any, context: Context) -> job_pb2.ListJobsResponse:
        self._note("ListJobs", context)
        return job_pb2.ListJobsResponse(jobs=self.jobs)

    def GetToken(self, request: Any, context: Context) -> job_pb2.GetTokenResponse:
        self._note("GetToken", context)
        token = job_pb2.TokenSummary(token_id=self.token_id, role=job_pb2.TOKEN_ROLE_USER)
        return job_pb2.GetTokenResponse(token=token)

    def RegisterSpecKey(self, request: Any, context: Context) -> spec_pb2.RegisterSpecKeyResponse:
        self._note("RegisterSpecKey", context)
        self.spec_keys.append(
            spec_pb2.SpecKey(
                public_key=request.public_key,
                token_id=self.token_id,
                label=request.label,
                state="good",
            )
        )
        return spec_pb2.RegisterSpecKeyResponse()

    def ListSpecKeys(self, request: Any, context: Context) -> spec_pb2.ListSpecKeysResponse:
        self._note("ListSpecKeys", context)
        return spec_pb2.ListSpecKeysResponse(keys=self.spec_keys)

    def RevokeSpecKey(self, request: Any, context: Context) -> spec_pb2.RevokeSpecKeyResponse:
        self._note("RevokeSpecKey", context)
        for key in self.spec_keys:
            if key.public_key == request.public_key:
                key.state = "revoked"
        return spec_pb2.RevokeSpecKeyResponse(jobs=0)

    def GetJob(self, request: Any, context: Context) -> job_pb2.GetJobResponse:
        self._note("GetJob", context)
        if self.is_away:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the test took it away")
        blob = tensor_pb2.BlobRef(digest=self.jobs[0].model, size_bytes=len(MODEL))
        return job_pb2.GetJobResponse(
            job=self.jobs[0],
            spec_json=json.dumps(SPEC),
            participants=[
                job_pb2.ParticipantSummary(
                    node_id=NODE,
                    name="attic",
                    slot=0,
                    state="pending",
                    steps_done=5,
                    steps_total=20,
                    loss=0.7,
                )
            ],
            model=tensor_pb2.ModelRef(blob=blob),
            forecast=forecast() if request.wants_forecast else None,
        )

    def EstimateJob(self, request: Any, context: Context) -> job_pb2.EstimateJobResponse:
        self._note(f"EstimateJob {request.parameters}", context)
        self.specs.append(request.spec_json)
        return job_pb2.EstimateJobResponse(forecast=forecast())

    def PauseJob(self, request: Any, context: Context) -> job_pb2.PauseJobResponse:
        self._note(f"PauseJob {request.job_id}", context)
        return job_pb2.PauseJobResponse()

    def ResumeJob(self, request: Any, context: Context) -> job_pb2.ResumeJobResponse:
        if self.jobs[0].phase != "paused":
            code = grpc.StatusCode.FAILED_PRECONDITION
            refuse(context, code, "JOB_PHASE", 2003, "the job is not paused")
        return job_pb2.ResumeJobResponse()

    def StopJob(self, request: Any, context: Context) -> job_pb2.StopJobResponse:
        self._note(f"StopJob {request.job_id}", context)
        return job_pb2.StopJobResponse()

    def SetParameters(self, request: Any, context: Context) -> job_pb2.SetParametersResponse:
        self._note(f"SetParameters {sorted(request.parameters.items())}", context)
        return job_pb2.SetParametersResponse()

    def RemoveJob(self, request: Any, context: Context) -> job_pb2.RemoveJobResponse:
        self._note(f"RemoveJob {request.job_id}", context)
        return job_pb2.RemoveJobResponse(freed_bytes=5000)

    def OfferData(self, request: Any, context: Context) -> job_pb2.OfferDataResponse:
        self._note("OfferData", context)
        digest, size_bytes = request.blob.digest.value, request.blob.size_bytes
        held_bytes = len(self.blobs.setdefault(digest, bytearray()))
        if held_bytes == size_bytes:
            return job_pb2.OfferDataResponse(is_stored=True)
        ranges = [self._range(f"upload/{digest.hex()}", held_bytes, size_bytes)]
        return job_pb2.OfferDataResponse(ticket=tensor_pb2.Ticket(ranges=ranges, life_ms=60_000))

    def CommitData(self, request: Any, context: Context) -> job_pb2.CommitDataResponse:
        self._note("CommitData", context)
        assert len(self.blobs[request.blob.digest.value]) == request.blob.size_bytes
        return job_pb2.CommitDataResponse()

    def ListResults(self, request: Any, context: Context) -> farm_pb2.ListResultsResponse:
        self._note(f"ListResults {request.from_number}", context)
        return farm_pb2.ListResultsResponse(is_over=True)

    def ResolveResult(self, request: Any, context: Context) -> farm_pb2.ResolveResultResponse:
        self._note("ResolveResult", context)
        ticket = tensor_pb2.Ticket(ranges=[self._range("model", 0, len(MODEL))], life_ms=60_000)
        return farm_pb2.ResolveResultResponse(ticket=ticket)

    def ResolveModel(self, request: Any, context: Context) -> job_pb2.ResolveModelResponse:
        self._note(f"ResolveModel {request.which}", context)
        self.doubts += request.is_doubted
        ticket = tensor_pb2.Ticket(ranges=[self._range("model", 0, len(MODEL))], life_ms=60_000)
        return job_pb2.ResolveModelResponse(
            blob=tensor_pb2.BlobRef(digest=self.jobs[0].model, size_bytes=len(MODEL)),
            layout_json=LAYOUT.to_json().decode(),
            model_card="# first\n",
            ticket=ticket,
        )

    def _range(self, name: str, start: int, end: int) -> tensor_pb2.TicketRange:
        url = f"http://{TLS_NAME}:{self.bulk_port}/{name}"
        return tensor_pb2.TicketRange(url=url, start=start, end=end)

    def breaks(self) -> bool:
        """Whether the transfer that has begun breaks off."""
        self.breaks_left -= 1
        return self.breaks_left >= 0

    def WatchJob(self, request: Any, context: Context) -> Iterator[job_pb2.WatchJobResponse]:
        self._note("WatchJob", context)
        self.offsets.append(request.from_sequence)
        for sequence, (kind, body) in enumerate(EVENTS):
            if sequence >= request.from_sequence:
                yield job_pb2.WatchJobResponse(
                    event=job_pb2.JobEvent(
                        sequence=sequence, at_ms=sequence, kind=kind, body_json=json.dumps(body)
                    )
                )
                if sequence == 1:
                    self._break(context)
        self.jobs = [summary("failed" if "failing" in self.called else "finished")]

    def WatchTelemetry(self, request: Any, context: Context) -> Any:
        raise NotImplementedError

    def ListNodes(self, request: Any, context: Context) -> job_pb2.ListNodesResponse:
        self._note("ListNodes", context)
        able = node_pb2.Capabilities(
            device="cuda",
            device_name="a card",
            memory_bytes=8_000_000_000,
            worker="torch",
            name="attic",
            workloads=[node_pb2.WorkloadVersion(name="digits-cnn", version=1)],
            caps=node_pb2.Caps(worker_threads=2),
            sandbox="bwrap",
        )
        node = job_pb2.NodeSummary(
            node_id=NODE,
            state="training",
            capabilities=able,
            job_id=JOB,
            last_seen_ms_ago=1200,
            software="hypergpu 0.1.0",
            updates_accepted=2,
            updates_rejected=1,
            reason="it has work",
            reading=job_pb2.Reading(
                round_trip_us=job_pb2.Estimate(mean=52_000, spread=2_500, samples=12, age_ms=800),
                least_round_trip_us=49_500,
                up_bits_per_s=job_pb2.Estimate(mean=6e6, spread=5e5, samples=3, age_ms=4_000),
                loss=job_pb2.Estimate(mean=0.0125, spread=0.005, samples=80, age_ms=9_000),
                congestion_control="cubic",
            ),
            health=job_pb2.Health(
                value=0.83,
                level="high",
                speed=0.75,
                reliability=0.9,
                quality=0.85,
                uptime=0.95,
                reason="speed 0.75 lowers it most",
            ),
            health_history=job_pb2.HealthHistory(step_minutes=1, points=bytes([0, 50, 255, 83])),
            plan_reason="H=20, int4, uplink 6 Mbit/s",
        )
        return job_pb2.ListNodesResponse(nodes=[node])

    def PauseNode(self, request: Any, context: Context) -> job_pb2.PauseNodeResponse:
        self._note(f"PauseNode {request.node_id}", context)
        return job_pb2.PauseNodeResponse()

    def ResumeNode(self, request: Any, context: Context) -> job_pb2.ResumeNodeResponse:
        self._note(f"ResumeNode {request.node_id}", context)
        return job_pb2.ResumeNodeResponse()

    def DrainNode(self, request: Any, context: Context) -> job_pb2.DrainNodeResponse:
        self._note(f"DrainNode {request.node_id}", context)
        return job_pb2.DrainNodeResponse()

    def RevokeNode(self, request: Any, context: Context) -> job_pb2.RevokeNodeResponse:
        self._note(f"RevokeNode {request.node_id}", context)
        return job_pb2.RevokeNodeResponse()

    def ReadmitNode(self, request: Any, context: Context) -> job_pb2.ReadmitNodeResponse:
        self._note(f"ReadmitNode {request.node_id}", context)
        return job_pb2.ReadmitNodeResponse()

    def CreateToken(self, request: Any, context: Context) -> job_pb2.CreateTokenResponse:
        self._note(f"CreateToken {request.role} {request.ttl_s} {request.uses}", context)
        return job_pb2.CreateTokenResponse(token="hgpu1.made", token_id="1" * 12)

    def ListTokens(self, request: Any, context: Context) -> job_pb2.ListTokensResponse:
        self._note("ListTokens", context)
        token = job_pb2.TokenSummary(
            token_id=self.token_id,
            role=job_pb2.TOKEN_ROLE_NODE,
            label="up",
            expires_in_s=3600,
            is_unlimited=True,
        )
        return job_pb2.ListTokensResponse(tokens=[token])

    def RevokeToken(self, request: Any, context: Context) -> job_pb2.RevokeTokenResponse:
        refuse(context, grpc.StatusCode.NOT_FOUND, "FROM_THE_FUTURE", 9001, "no such thing")
        return job_pb2.RevokeTokenResponse()

    def CertifyGateway(self, request: Any, context: Context) -> job_pb2.CertifyGatewayResponse:
        self.called.append("CertifyGateway")
        return job_pb2.CertifyGatewayResponse()


class FakeServing(serving_pb2_grpc.ServingServiceServicer):
    """The service of served models, of which there are none."""

    def __init__(self, service: FakeService) -> None:
        self._note = service._note

    def ListModels(self, request: Any, context: Context) -> serving_pb2.ListModelsResponse:
        return serving_pb2.ListModelsResponse()

    def Answer(self, request: Any, context: Context) -> Iterator[serving_pb2.AnswerResponse]:
        return iter(())

    def CertifyApi(self, request: Any, context: Context) -> serving_pb2.CertifyApiResponse:
        return serving_pb2.CertifyApiResponse()

    def LabelNode(self, request: Any, context: Context) -> serving_pb2.LabelNodeResponse:
        self._note(f"LabelNode {request.node_id} {' '.join(request.labels)}", context)
        return serving_pb2.LabelNodeResponse()


class _BulkRequest(BaseHTTPRequestHandler):
    """One request at the bulk port."""

    protocol_version = "HTTP/1.1"
    service: FakeService

    def give(self) -> None:
        start, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.service.offsets.append(start)
        self.send_response(206)
        self.send_header("Content-Length", str(last + 1 - start))
        self.end_headers()
        if self.service.breaks():
            last, self.close_connection = start + CHUNK - 1, True
        self.wfile.write(self.service.model[start : last + 1])

    def take(self) -> None:
        start, last = map(int, self.headers["Content-Range"][6:-2].split("-"))
        self.service.offsets.append(start)
        held_bytes = self.service.blobs[bytes.fromhex(self.path.removeprefix("/upload/"))]
        assert start == len(held_bytes)
        if self.service.breaks():
            held_bytes += self.rfile.read(CHUNK)
            self.close_connection = True
            return
        held_bytes += self.rfile.read(last + 1 - start)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


EVENTS: list[tuple[str, dict[str, object]]] = [
    ("JobCreated", {"job_id": JOB}),
    ("NodeJoined", {"node": NODE}),
    (
        "RoundRecorded",
        {
            "round": 0,
            "participants": 1,
            "updates": 1,
            "bytes_up": 1200,
            "bytes_down": 2400,
            "duration_ms": 1500,
            "loss": 0.25,
            "samples_per_s": 100.0,
            "reason": "all updates are there",
        },
    ),
    ("EvaluationReady", {"round": 1, "loss": 0.5, "metric": 0.9, "metric_name": "accuracy"}),
    ("NodeLost", {"node": NODE, "reason": "not heard of for 15 s"}),
]


@contextlib.contextmanager
def serving(
    service: FakeService, payments: payments_pb2_grpc.PaymentsServiceServicer | None = None
) -> Iterator[int]:
    """Serve on a free port of loopback while the block runs."""
    server = grpc.server(ThreadPoolExecutor(4))
    if payments is not None:
        payments_pb2_grpc.add_PaymentsServiceServicer_to_server(payments, server)
    job_pb2_grpc.add_JobServiceServicer_to_server(service, server)
    job_pb2_grpc.add_OperatorServiceServicer_to_server(service, server)
    serving_pb2_grpc.add_ServingServiceServicer_to_server(FakeServing(service), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    answers = {"service": service, "do_GET": _BulkRequest.give, "do_PUT": _BulkRequest.take}
    handler = type("BulkRequest", (_BulkRequest,), answers)
    bulk = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    service.bulk_port = bulk.server_port
    bulk_thread = threading.Thread(target=bulk.serve_forever, kwargs={"poll_interval": 0.01})
    bulk_thread.start()
    try:
        yield port
    finally:
        bulk.shutdown()
        bulk_thread.join()
        bulk.server_close()
        stop_event: threading.Event = server.stop(None)
        stop_event.wait(5)
