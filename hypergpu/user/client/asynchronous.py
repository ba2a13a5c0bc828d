"""The one implementation of every call of JobService, OperatorService and PaymentsService."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.map_request import MapRequest
from hypergpu.ids import NodeId
from hypergpu.jobfile.continuation import continuing, initial_weights, is_job_id
from hypergpu.jobfile.reading import data_folder, read_job_file, spec_json
from hypergpu.jobfile.rules import checked_spec
from hypergpu.jobfile.spec import JobSpec
from hypergpu.serving.calls import AnswerPart, ModelCall
from hypergpu.serving.serve_request import ServeRequest
from hypergpu.statements import SignedReceipt
from hypergpu.user.client import budgets, bundles, models, values
from hypergpu.user.client.bundles import ResultsView, ResultView
from hypergpu.user.client.connection import RESTARTING, ConnectionTarget, CoordinatorCalls, pause_s
from hypergpu.user.client.export import ExportedModel, ExportOrder, fetch_model
from hypergpu.user.client.forecasts import JobForecastView, forecast_view
from hypergpu.user.client.ledger import JobLedger, job_ledger
from hypergpu.user.client.models import AnswerRoute, ApiCertificate, ServedModelView
from hypergpu.user.client.names import job_named, node_named, token_named
from hypergpu.user.client.resume import ReportProgress, ignore
from hypergpu.user.client.ring_export import RingExportOrder, fetch_ring_adapter
from hypergpu.user.client.spec_keys import (
    OwnKey,
    SpecKeyView,
    key_views,
    registration,
    signature_of,
)
from hypergpu.user.client.upload import send_file, send_folder
from hypergpu.user.client.values import (
    ENDED,
    JobDetail,
    JobEvent,
    JobUpdate,
    JobView,
    NodeLevelsView,
    NodeView,
    TokenMade,
    TokenView,
)
from hypergpu.v1 import job_pb2, payments_pb2, spec_pb2
from hypergpu.wire.credentials import Role, Token
from hypergpu.wire.messages import receipt_value

WATCH_TIMEOUT_S = 3600.0
"""A watch is opened again after this, from where it was."""
CREATE_TRIES = 3
AWAY_MOST_S = 600.0
"""A coordinator that is away for longer ends a watch; restarting one takes seconds."""


class _Absence:
    """How long a coordinator has not answered a watch."""

    def __init__(self) -> None:
        self._tries = 0
        self._since_s: float | None = None

    def end(self) -> None:
        """It answered."""
        self._tries, self._since_s = 0, None

    def check(self, refused: HyperGPUError) -> None:
        """Raise an error that waiting does not cure, or that has lasted too long."""
        now_s = asyncio.get_running_loop().time()
        self._since_s = now_s if self._since_s is None else self._since_s
        if refused.reason not in RESTARTING or now_s - self._since_s > AWAY_MOST_S:
            raise refused

    async def wait(self) -> None:
        """Wait before the next try, longer each time."""
        self._tries += 1
        await asyncio.sleep(pause_s(self._tries))


class AsyncCoordinator:
    """An open connection. Use it as an asynchronous context manager; ``connect_async`` opens it.

    Every method raises `HyperGPUError` (or `RemoteFailureError`, for a reason that only the
    coordinator's newer version knows): number, message and fix.
    """

    def __init__(self, calls: CoordinatorCalls) -> None:
        self.address = calls.to.address
        self.token_id = calls.to.token.id
        self._calls = calls
        self._jobs, self._operator = calls.jobs, calls.operator
        self._payments = calls.payments
        self._call = calls.call

    @classmethod
    async def open(cls, to: ConnectionTarget) -> Self:
        """Connect; the secret travels only after the coordinator's CA was checked."""
        return cls(await CoordinatorCalls.open(to))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and end what still runs over it."""
        await self._calls.close()

    async def submit(
        self,
        job: JobSpec | Path | str,
        *,
        beside: Path | None = None,
        request_id: str = "",
        report: ReportProgress = ignore,
    ) -> str:
        """Send a job's data and create the job; returns its id.

        Args:
            job: Settings, or the path of a job file.
            beside: Folder that a relative ``data.path`` starts at; else the job file's.
            request_id: Requests with the same id create one job; else this call creates one.
            report: Called with the step, the bytes that are done and the bytes there are.
        """
        if isinstance(job, JobSpec):
            spec, folder = job, beside or Path()
        else:
            spec, folder = read_job_file(Path(job)), beside or Path(job).parent
        request = job_pb2.CreateJobRequest(
            spec_json=spec_json(spec), request_id=request_id or uuid.uuid4().hex
        )
        if is_job_id(spec.model.init):
            request.weights_job = spec.model.init
        elif spec.model.init:
            file = initial_weights(spec, folder)
            request.weights_file.CopyFrom(await send_file(self._calls, file, report))
        if spec.data.path:
            manifest = await send_folder(self._calls, data_folder(spec, folder), report)
            request.manifest.CopyFrom(manifest)
        return await self._create_job(request)

    async def estimate(self, job: JobSpec | Path | str, *, parameters: int = 0) -> JobForecastView:
        """What a job would take with the nodes that are there. Sends no data and creates nothing.

        Args:
            job: Settings, or the path of a job file.
            parameters: Of the model; 0: the coordinator finds out by workload and options.
        """
        spec = job if isinstance(job, JobSpec) else read_job_file(Path(job))
        request = job_pb2.EstimateJobRequest(spec_json=spec_json(spec), parameters=parameters)
        response = await self._call(self._jobs.EstimateJob, request)
        return forecast_view(response.forecast)

    async def continue_job(self, job_id: str, rounds: int, *, name: str = "") -> str:
        """Create a job that goes on from another's newest model, with its settings and data.

        The other one stays as it is. The new one draws its samples in another order and has
        neither warm-up nor target.

        Args:
            job_id: The job to go on from.
            rounds: Rounds of the new job.
            name: Name of the new job; else that of the other.
        """
        spec = continuing(await self.spec(job_id), job_id, rounds)
        continued_spec = checked_spec(msgspec.structs.replace(spec, name=name or spec.name))
        request = job_pb2.CreateJobRequest(
            spec_json=spec_json(continued_spec), request_id=uuid.uuid4().hex, weights_job=job_id
        )
        return await self._create_job(request)

    async def _create_job(self, request: job_pb2.CreateJobRequest) -> str:
        """Create a job, trying again while the coordinator is away."""
        for idle_tries in range(1, CREATE_TRIES):
            try:
                return str((await self._call(self._jobs.CreateJob, request)).job_id)
            except HyperGPUError as error:
                if error.reason not in RESTARTING:
                    raise
                await asyncio.sleep(pause_s(idle_tries))
        return str((await self._call(self._jobs.CreateJob, request)).job_id)

    async def send_blobs(
        self, paths: Sequence[Path], *, step: str, report: ReportProgress = ignore
    ) -> list[BlobRef]:
        """Send files that a farm job names, each unless the coordinator holds it.

        Args:
            paths: The files.
            step: What is sent, for the report.
            report: Called with the step, the bytes that are done and the bytes there are.
        """
        return await bundles.send_blobs(self._calls, paths, step, report)

    async def create_map(self, request: MapRequest, *, request_id: str = "") -> str:
        """Create a farm job of blobs that were sent; returns its id. It is signed where this user
        has a key for the token.

        Args:
            request: The job.
            request_id: Requests with the same id create one job; else this call creates one.
        """
        signed_spec = await asyncio.to_thread(signature_of, self._calls, request)
        return await self._create_job(
            bundles.map_job_request(request, request_id or uuid.uuid4().hex, signed_spec)
        )

    async def create_serve(self, request: ServeRequest, *, request_id: str = "") -> str:
        """Create the job of a served model whose files were sent, once for an id; gives its id."""
        job_request = models.serve_job_request(request, request_id or uuid.uuid4().hex)
        return await self._create_job(job_request)

    async def models(self) -> list[ServedModelView]:
        """Served models that this token may call."""
        return await models.list_models(self._calls)

    def answer(self, model: str, call: ModelCall) -> AsyncIterator[AnswerRoute | AnswerPart]:
        """The parts of a model's answer as they come, with the node that gives them.

        Args:
            model: Name of a served model, or the id of its job.
            call: The prompt, and how it is to be answered.
        """
        return models.answer(self._calls, model, call)

    async def results(
        self, job_id: str, from_number: int = 0, *, from_dropped: int = 0
    ) -> ResultsView:
        """Accepted results of a farm job from a number on, in order of their acceptance, and items
        that were given up from another number on, in theirs.
        """
        return await bundles.list_results(self._calls, job_id, from_number, from_dropped)

    async def fetch_result(self, job_id: str, result: ResultView, target: Path) -> None:
        """Fetch the blob of an accepted result into a file."""
        await bundles.fetch_result(self._calls, job_id, result, target)

    async def jobs(self) -> list[JobView]:
        """Every job, oldest first."""
        pages = await self._all_pages(self._jobs.ListJobs, job_pb2.ListJobsRequest)
        return [values.job_view(each) for page in pages for each in page.jobs]

    async def find_job(self, name: str | None = None) -> str:
        """Id of the job with this id, name or beginning of an id; without a name the newest's."""
        return job_named(await self.jobs(), name)

    async def job(self, job_id: str, *, wants_forecast: bool = False) -> JobDetail:
        """One job with its settings and participants, and what it takes until its end if asked."""
        request = job_pb2.GetJobRequest(job_id=job_id, wants_forecast=wants_forecast)
        return values.job_detail(await self._call(self._jobs.GetJob, request))

    async def spec(self, job_id: str) -> JobSpec:
        """Settings of a job."""
        response = await self._call(self._jobs.GetJob, job_pb2.GetJobRequest(job_id=job_id))
        return msgspec.json.decode(response.spec_json, type=JobSpec)

    async def watch(self, job_id: str, from_sequence: int = 0) -> AsyncIterator[JobUpdate]:
        """Follow a job until it has ended: each event once, across breaks of the connection."""
        next_sequence, absence = from_sequence, _Absence()
        while True:
            request = job_pb2.WatchJobRequest(job_id=job_id, from_sequence=next_sequence)
            try:
                async for message in self._stream(self._jobs.WatchJob, request):
                    absence.end()
                    update = values.job_update(message)
                    if isinstance(update, JobEvent):
                        next_sequence = update.sequence + 1
                    yield update
                if (await self.job(job_id)).job.phase in ENDED:
                    return
            except HyperGPUError as error:
                absence.check(error)
            await absence.wait()

    async def read_events(self, job_id: str, from_sequence: int = 0) -> AsyncIterator[JobEvent]:
        """Events from a sequence number on, then live, until the stream ends or breaks."""
        request = job_pb2.WatchJobRequest(
            job_id=job_id, from_sequence=from_sequence, events_only=True
        )
        async for message in self._stream(self._jobs.WatchJob, request):
            if message.HasField("event"):
                yield values.job_event(message.event)

    async def watch_telemetry(self) -> AsyncIterator[tuple[NodeLevelsView, ...]]:
        """Levels of all nodes, then of those that changed, across breaks of the connection.

        A reader that is slow gets the newest levels and misses those between. After a break all
        nodes are told again. It ends only by an error, such as that of a revoked token.
        """
        request, absence = job_pb2.WatchTelemetryRequest(), _Absence()
        while True:
            try:
                async for message in self._stream(self._operator.WatchTelemetry, request):
                    absence.end()
                    yield tuple(values.node_levels_view(each) for each in message.nodes)
            except HyperGPUError as error:
                absence.check(error)
            await absence.wait()

    def _stream(self, method: Callable[..., Any], request: object) -> AsyncIterator[Any]:
        return self._calls.stream(method, request, WATCH_TIMEOUT_S)

    async def pause(self, job_id: str) -> None:
        """Stop the job's work now; what was accepted stays, and a resume goes on from it."""
        await self._call(self._jobs.PauseJob, job_pb2.PauseJobRequest(job_id=job_id))

    async def resume(self, job_id: str) -> None:
        """Go on with a paused job."""
        await self._call(self._jobs.ResumeJob, job_pb2.ResumeJobRequest(job_id=job_id))

    async def stop(self, job_id: str) -> None:
        """End a job with the model there is."""
        await self._call(self._jobs.StopJob, job_pb2.StopJobRequest(job_id=job_id))

    async def set_parameters(self, job_id: str, parameters: Mapping[str, str]) -> None:
        """Change settings from the next round on; keys are dotted, values are JSON."""
        request = job_pb2.SetParametersRequest(job_id=job_id, parameters=dict(parameters))
        await self._call(self._jobs.SetParameters, request)

    async def raise_budget(self, job_id: str, budget: int) -> None:
        """Let a farm job cost more, in the smallest unit of money. See `budgets.raise_budget`."""
        await budgets.raise_budget(self._calls, job_id, budget)

    async def remove(self, job_id: str) -> int:
        """Delete an ended job; returns the bytes freed."""
        request = job_pb2.RemoveJobRequest(job_id=job_id)
        return int((await self._call(self._jobs.RemoveJob, request)).freed_bytes)

    async def export(
        self,
        job_id: str,
        folder: Path,
        *,
        which: str = "latest",
        may_overwrite: bool = False,
        is_weights_alone: bool = False,
        report: ReportProgress = ignore,
    ) -> ExportedModel:
        """Write a job's model as safetensors, its card and a program that loads it; an interrupted
        export goes on. A model of `hypergpu.train` gets its operators in ``program/``, by which it
        runs without the module's code.

        Args:
            job_id: The job.
            folder: Created when missing.
            which: ``latest`` or ``best``.
            may_overwrite: Whether files that no export of this job wrote may be replaced.
            is_weights_alone: Whether ``program/`` is left out.
            report: Called with the step, the bytes that are done and the bytes there are.
        """
        job = await self.job(job_id)
        if not job.spec:  # It is no training of nodes that hold its model whole.
            ring_order = RingExportOrder(job_id, folder, which, may_overwrite)
            return await fetch_ring_adapter(self._calls, ring_order, report)
        spec = msgspec.convert(job.spec, JobSpec)
        order = ExportOrder(
            *(job_id, folder, which, may_overwrite, spec.workload, spec.options),
            *(spec.data.name, is_weights_alone),
        )
        return await fetch_model(self._calls, order, report)

    async def ledger(self, job_id: str) -> JobLedger:
        """What a job owes its nodes."""
        request = payments_pb2.GetLedgerRequest(job_id=job_id)
        try:
            return job_ledger(job_id, await self._call(self._payments.GetLedger, request))
        except HyperGPUError as error:
            if error.reason is not Reason.VERSION_MISMATCH:
                raise
            detail = f"the coordinator at {self.address} has no payments package, or is older"
            fix = "install hypergpu whole where the coordinator runs"
            raise HyperGPUError(error.reason, detail, fix=fix) from error

    async def receipts(self, job_id: str) -> AsyncIterator[SignedReceipt]:
        """Every receipt of a job, by node and in order."""
        request = payments_pb2.ListReceiptsRequest(job_id=job_id)
        async for message in self._calls.stream(self._payments.ListReceipts, request):
            for each in message.receipts:
                yield receipt_value(each, NodeId(message.node_id))

    async def request_reclaim(self, job_id: str) -> str:
        """Announce a job's end on its ledger; returns the purpose of the transaction."""
        request = payments_pb2.RequestReclaimRequest(job_id=job_id)
        return str((await self._call(self._payments.RequestReclaim, request)).purpose)

    async def reclaim(self, job_id: str) -> str:
        """Take a job's free escrow; returns the purpose of the transaction."""
        request = payments_pb2.ReclaimRequest(job_id=job_id)
        return str((await self._call(self._payments.Reclaim, request)).purpose)

    async def retry_halted(self, job_id: str) -> list[str]:
        """Clear a job's halt; returns the purposes of what is tried again."""
        request = payments_pb2.RetryHaltedRequest(job_id=job_id)
        return list((await self._call(self._payments.RetryHalted, request)).purposes)

    async def nodes(self) -> list[NodeView]:
        """Every node the coordinator knows."""
        pages = await self._all_pages(self._operator.ListNodes, job_pb2.ListNodesRequest)
        return [values.node_view(each) for page in pages for each in page.nodes]

    async def _all_pages(self, method: Any, form: Any) -> list[Any]:
        """All answers of a call that gives a list in pages."""
        answers = [await self._call(method, form())]
        while page := answers[-1].next_page:
            answers.append(await self._call(method, form(page=page)))
        return answers

    async def find_node(self, name: str) -> NodeView:
        """The node with this name or beginning of an id."""
        return node_named(await self.nodes(), name)

    async def drain(self, node_id: str) -> None:
        """Let a node finish what it holds and leave."""
        await self._call(self._operator.DrainNode, job_pb2.DrainNodeRequest(node_id=node_id))

    async def pause_node(self, node_id: str) -> None:
        """Take a node's work back at once and give it no more until it is resumed."""
        await self._call(self._operator.PauseNode, job_pb2.PauseNodeRequest(node_id=node_id))

    async def label_node(self, node_id: str, labels: Sequence[str]) -> None:
        """Give a node labels in place of those before, which served models may ask for."""
        await models.label_node(self._calls, node_id, labels)

    async def certify_api(self, request_pem: bytes, hosts: Sequence[str]) -> ApiCertificate:
        """A certificate of the coordinator's CA for the TLS key of an API of served models."""
        return await models.certify_api(self._calls, request_pem, hosts)

    async def resume_node(self, node_id: str) -> None:
        """Let a paused node take work again."""
        await self._call(self._operator.ResumeNode, job_pb2.ResumeNodeRequest(node_id=node_id))

    async def revoke_node(self, node_id: str) -> None:
        """Shut a node out."""
        await self._call(self._operator.RevokeNode, job_pb2.RevokeNodeRequest(node_id=node_id))

    async def readmit_node(self, node_id: str) -> None:
        """Take a node's revocation back."""
        await self._call(self._operator.ReadmitNode, job_pb2.ReadmitNodeRequest(node_id=node_id))

    async def tokens(self) -> list[TokenView]:
        """Every token, without its secret."""
        pages = await self._all_pages(self._operator.ListTokens, job_pb2.ListTokensRequest)
        return [values.token_view(each) for page in pages for each in page.tokens]

    async def own_token(self, token: Token | None = None) -> TokenView:
        """What the coordinator knows of the token of this connection, its role among it.

        Args:
            token: Another token of the same coordinator, in place of the connection's.
        """
        request = job_pb2.GetTokenRequest()
        answer = await self._call(self._jobs.GetToken, request, token=token)
        return values.token_view(answer.token)

    async def register_spec_key(self, own_key: OwnKey, label: str = "") -> None:
        """Register a key that signs farm jobs of this connection's token."""
        await self._call(self._jobs.RegisterSpecKey, registration(own_key, self.token_id, label))

    async def spec_keys(self) -> list[SpecKeyView]:
        """Keys that sign farm jobs of this token; an operator's, those of all."""
        request = spec_pb2.ListSpecKeysRequest()
        return key_views(await self._call(self._jobs.ListSpecKeys, request))

    async def revoke_spec_key(self, public_key: bytes) -> int:
        """Revoke a key for good; returns the number of its jobs that were paused."""
        request = spec_pb2.RevokeSpecKeyRequest(public_key=public_key)
        return int((await self._call(self._jobs.RevokeSpecKey, request)).jobs)

    async def find_token(self, name: str) -> str:
        """Id of the token whose id begins so."""
        return token_named(await self.tokens(), name)

    async def create_token(
        self, role: Role, *, ttl_s: int = 86_400, uses: int = 0, label: str = ""
    ) -> TokenMade:
        """A new token, whose text is shown this once; without uses it has no limit."""
        request = job_pb2.CreateTokenRequest(
            role=values.ROLES[role], ttl_s=ttl_s, uses=uses, label=label
        )
        response = await self._call(self._operator.CreateToken, request)
        return TokenMade(response.token_id, role.value, response.token)

    async def revoke_token(self, token_id: str) -> int:
        """Make a token worthless and shut its nodes out; returns the number of these."""
        request = job_pb2.RevokeTokenRequest(token_id=token_id)
        return int((await self._call(self._operator.RevokeToken, request)).nodes)
