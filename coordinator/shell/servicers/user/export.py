"""`ExportModel`: a model's bytes with what turns them into named tensors, and its card."""

from collections.abc import AsyncIterator

from coordinator.core.job.state import Job, Model, ModelScore
from coordinator.shell.runtime.job_runtime import JobRuntime
from coordinator.shell.runtime.services import Services
from coordinator.shell.servicers.serving import BlobRange, blob_chunks
from coordinator.shell.servicers.wire import chunks
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile import spec_json
from hypergpu.v1 import job_pb2
from hypergpu.wire.assignment import blob_message, digest_value


async def export_model(
    services: Services, runtime: JobRuntime, request: job_pb2.ExportModelRequest
) -> AsyncIterator[job_pb2.ExportModelResponse | bytes]:
    """Header, then chunks from the offset that the caller holds of this very model."""
    model = _choose_model(runtime.job, request.which or "latest")
    if runtime.layout is None:
        raise HyperGPUError(Reason.NOT_READY, "the job is being taken up again")
    header = job_pb2.ExportHeader(
        blob=blob_message(model.blob),
        layout_json=runtime.layout.to_json().decode(),
        model_card=model_card(runtime.job, model),
    )
    yield job_pb2.ExportModelResponse(header=header)
    offset = 0
    if request.HasField("digest") and digest_value(request.digest) == model.blob.digest:
        offset = min(request.offset, model.blob.size_bytes)
    async for start, payload in blob_chunks(services, BlobRange(model.blob.digest, offset)):
        yield chunks.encode_exported(start, payload)


def _choose_model(job: Job, which: str) -> Model:
    if which not in {"latest", "best"}:
        detail = f"which is 'latest' or 'best', not {which[:40]!r}"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    model = job.model if which == "latest" else job.best_model
    if model is None:
        why = "no model yet" if which == "latest" else "no evaluated model yet"
        raise HyperGPUError(Reason.MODEL_MISSING, f"{job.job_id} has {why}")
    return model


def model_card(job: Job, model: Model) -> str:
    """What a person should know about the file, as Markdown."""
    spec = job.spec
    scores = [score for score in (job.score, job.best) if score and score.round == model.round]
    lines = [
        f"# {spec.name or spec.workload}",
        "",
        f"Trained by HyperGPU job `{job.job_id}` on workload `{spec.workload}`.",
        "",
        f"- Rounds: {model.round} of {spec.training.rounds}",
        f"- Inner steps a round: {spec.training.inner_steps}",
        f"- Samples trained on, whole job: {job.tally.samples}",
        f"- Nodes that took part: {len(job.members)}",
        f"- Updates accepted: {job.tally.updates_accepted}, refused: {job.tally.updates_refused}",
        f"- Codec: {spec.codec.up} up, {spec.codec.down} down",
        f"- Model digest (BLAKE3): `{model.blob.digest}`",
        *(_score_line(score) for score in scores[:1]),
        "",
        "## Settings",
        "",
        "```json",
        spec_json(spec),
        "```",
        "",
    ]
    return "\n".join(lines)


def _score_line(score: ModelScore) -> str:
    return f"- Held-out loss {score.loss:.4f}, {score.metric_name} {score.metric:.4f}"
