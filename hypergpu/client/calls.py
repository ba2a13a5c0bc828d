"""Every call of JobService and OperatorService, with a deadline and its refusal explained."""

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TypeVar

from hypergpu.client.connection import Target, check_who_answers, open_channel, target
from hypergpu.client.failures import explained
from hypergpu.digest import digest_to_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.v1 import job_pb2, job_pb2_grpc, payments_pb2, payments_pb2_grpc, tensor_pb2
from hypergpu.wire.protocol import PROTOCOL_ENTRY
from hypergpu.wire.token import Role, authorization

WATCH_TIMEOUT_S = 3600.0
"""A watch is opened again after this, from where it was."""
TRANSFER_TIMEOUT_S = 600.0
"""One try of a transfer; the next goes on from the committed offset."""

CREATE_TRIES = 3

RESTARTING = frozenset({Reason.COORDINATOR_UNREACHABLE, Reason.NOT_READY})
"""What a coordinator that is being restarted is taken for: trying again may help."""

Response = TypeVar("Response")

_ROLES = {
    Role.NODE: job_pb2.TOKEN_ROLE_NODE,
    Role.USER: job_pb2.TOKEN_ROLE_USER,
    Role.OPERATOR: job_pb2.TOKEN_ROLE_OPERATOR,
}


class Coordinator:
    """An open connection. Use it as a context manager."""

    def __init__(self, to: Target) -> None:
        self.address = to.address
        self.token_id = to.token.id
        self._to = to
        self._metadata = (("authorization", authorization(to.token)), PROTOCOL_ENTRY)
        self._channel = open_channel(to)
        self._jobs = job_pb2_grpc.JobServiceStub(self._channel)
        self._operator = job_pb2_grpc.OperatorServiceStub(self._channel)
        self._payments = payments_pb2_grpc.PaymentsServiceStub(self._channel)

    def __enter__(self) -> "Coordinator":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def _call(
        self, method: Callable[..., Response], request: object, timeout_s: float | None = None
    ) -> Response:
        with self._explained():
            return method(request, timeout=timeout_s or self._to.timeout_s, metadata=self._metadata)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """As `explained`; of a connection that fails it is found out whose fault that is."""
        try:
            with explained(self.address):
                yield
        except HyperGPUError as refused:
            if refused.reason is Reason.COORDINATOR_UNREACHABLE:
                check_who_answers(self._to)
            raise

    def create_job(self, spec: str, manifest: tensor_pb2.Manifest | None) -> str:
        """Submit; returns the job's id. Sent again after a break, it creates nothing twice."""
        request = job_pb2.CreateJobRequest(
            spec_json=spec, manifest=manifest, request_id=uuid.uuid4().hex
        )
        for idle_tries in range(1, CREATE_TRIES):
            try:
                return self._call(self._jobs.CreateJob, request).job_id
            except HyperGPUError as refused:
                if refused.reason not in RESTARTING:
                    raise
                time.sleep(pause_s(idle_tries))
        return self._call(self._jobs.CreateJob, request).job_id

    def job(self, job_id: str) -> job_pb2.GetJobResponse:
        """One job with its settings and participants."""
        return self._call(self._jobs.GetJob, job_pb2.GetJobRequest(job_id=job_id))

    def jobs(self) -> list[job_pb2.JobSummary]:
        """Every job."""
        return list(self._call(self._jobs.ListJobs, job_pb2.ListJobsRequest()).jobs)

    def pause(self, job_id: str) -> None:
        """Open no further round."""
        self._call(self._jobs.PauseJob, job_pb2.PauseJobRequest(job_id=job_id))

    def resume(self, job_id: str) -> None:
        """Go on."""
        self._call(self._jobs.ResumeJob, job_pb2.ResumeJobRequest(job_id=job_id))

    def stop(self, job_id: str) -> None:
        """End with the model there is."""
        self._call(self._jobs.StopJob, job_pb2.StopJobRequest(job_id=job_id))

    def change(self, job_id: str, parameters: Mapping[str, str]) -> None:
        """Change settings from the next round on; values are JSON."""
        request = job_pb2.SetParametersRequest(job_id=job_id, parameters=dict(parameters))
        self._call(self._jobs.SetParameters, request)

    def remove(self, job_id: str) -> int:
        """Delete an ended job; returns the bytes freed."""
        request = job_pb2.RemoveJobRequest(job_id=job_id)
        return self._call(self._jobs.RemoveJob, request).freed_bytes

    def uploaded(self, blob: tensor_pb2.BlobRef) -> int:
        """How much of a blob the coordinator holds."""
        request = job_pb2.QueryDataRequest(blob=blob)
        return self._call(self._jobs.QueryData, request).committed_offset

    def upload(self, messages: Iterator[job_pb2.UploadDataRequest]) -> int:
        """Send one blob from an offset; returns the committed offset."""
        response = self._call(self._jobs.UploadData, messages, TRANSFER_TIMEOUT_S)
        return response.committed_offset

    def export(self, request: job_pb2.ExportModelRequest) -> Iterator[job_pb2.ExportModelResponse]:
        """A model's header and chunks."""
        with self._explained():
            yield from self._jobs.ExportModel(
                request, timeout=TRANSFER_TIMEOUT_S, metadata=self._metadata
            )

    def ledger(self, job_id: str) -> payments_pb2.GetLedgerResponse:
        """The accounts of a job and the state of its settlement."""
        request = payments_pb2.GetLedgerRequest(job_id=job_id)
        return self._call(self._payments.GetLedger, request)

    def receipts(self, job_id: str) -> Iterator[payments_pb2.ListReceiptsResponse]:
        """Every receipt of a job, by node and in order."""
        request = payments_pb2.ListReceiptsRequest(job_id=job_id)
        with self._explained():
            yield from self._payments.ListReceipts(
                request, timeout=TRANSFER_TIMEOUT_S, metadata=self._metadata
            )

    def watch(self, job_id: str, from_sequence: int) -> Iterator[job_pb2.WatchJobResponse]:
        """The job's events from a sequence number on, then live."""
        request = job_pb2.WatchJobRequest(job_id=job_id, from_sequence=from_sequence)
        return self._jobs.WatchJob(request, timeout=WATCH_TIMEOUT_S, metadata=self._metadata)

    def nodes(self) -> list[job_pb2.NodeSummary]:
        """Every node the coordinator knows."""
        return list(self._call(self._operator.ListNodes, job_pb2.ListNodesRequest()).nodes)

    def drain(self, node_id: str) -> None:
        """Let a node finish what it holds and leave."""
        self._call(self._operator.DrainNode, job_pb2.DrainNodeRequest(node_id=node_id))

    def revoke_node(self, node_id: str) -> None:
        """Shut a node out."""
        self._call(self._operator.RevokeNode, job_pb2.RevokeNodeRequest(node_id=node_id))

    def readmit_node(self, node_id: str) -> None:
        """Take a node's revocation back."""
        self._call(self._operator.ReadmitNode, job_pb2.ReadmitNodeRequest(node_id=node_id))

    def create_token(
        self, role: Role, *, ttl_s: int, uses: int, label: str
    ) -> job_pb2.CreateTokenResponse:
        """A new token; its text is shown once."""
        request = job_pb2.CreateTokenRequest(role=_ROLES[role], ttl_s=ttl_s, uses=uses, label=label)
        return self._call(self._operator.CreateToken, request)

    def tokens(self) -> list[job_pb2.TokenSummary]:
        """Every token, without its secret."""
        return list(self._call(self._operator.ListTokens, job_pb2.ListTokensRequest()).tokens)

    def revoke_token(self, token_id: str) -> None:
        """Make a token worthless."""
        request = job_pb2.RevokeTokenRequest(token_id=token_id)
        self._call(self._operator.RevokeToken, request)


def connect(address: str | None = None, token_file: str | None = None) -> Coordinator:
    """A connection to the coordinator that flags, environment and files name.

    Raises:
        HyperGPUError: None is named, none answers, or it is another than the token says.
    """
    return Coordinator(target({"address": address, "token_file": token_file}))


def pause_s(idle_tries: int) -> float:
    """How long to wait before trying again: doubled each time, at most 5 s."""
    return float(min(5.0, 0.1 * 2**idle_tries))


def blob_ref(digest: Digest, size_bytes: int) -> tensor_pb2.BlobRef:
    """A blob's name as it travels."""
    wire = tensor_pb2.Digest(value=digest_to_wire(digest))
    return tensor_pb2.BlobRef(digest=wire, size_bytes=size_bytes)


def body(event: job_pb2.JobEvent) -> dict[str, object]:
    """An event's fields."""
    fields = json.loads(event.body_json or "{}")
    return fields if isinstance(fields, dict) else {}
