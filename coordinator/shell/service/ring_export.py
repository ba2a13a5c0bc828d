"""The export of an adapter that a ring trained."""

import asyncio

import msgspec

from coordinator.core.serving.state import ServeJob
from coordinator.shell.store.storage import Storage
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import BASE_INDEX
from hypergpu.rings.ring_adapter import RingAdapter
from hypergpu.v1 import job_pb2
from hypergpu.wire.messages import blob_message


async def resolve_ring_adapter(
    storage: Storage, job: ServeJob, request: job_pb2.ResolveModelRequest
) -> job_pb2.ResolveModelResponse:
    """Tickets for the adapters of all layers in the newest stored round, and the base's settings.

    Raises:
        HyperGPUError: REQUEST_INVALID, the model is trained by no ring; MODEL_MISSING, no round of
            it is stored.
    """
    adapter = _adapter_of(job)
    if request.which == "best":
        detail = f"{job.job_id} was trained through a ring, which keeps its newest round alone"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="leave --best out")
    blobs = dict(job.stored_round.adapter) if job.stored_round is not None else {}
    blobs[BASE_INDEX] = job.request.files[BASE_INDEX]
    for each in blobs.values():
        await asyncio.to_thread(storage.blobs.find, each.digest)
        if request.is_doubted:
            await storage.bulk.doubt(each.digest)
    return job_pb2.ResolveModelResponse(
        model_card=_card(job.request.model, adapter),
        ring_adapter_json=msgspec.json.encode(adapter).decode(),
        files=[
            job_pb2.ModelFile(
                path=name, blob=blob_message(each), ticket=await storage.bulk.ticket(None, each)
            )
            for name, each in sorted(blobs.items())
        ],
    )


def _adapter_of(job: ServeJob) -> RingAdapter:
    training, cut, stored_round = job.request.training, job.request.cut, job.stored_round
    if training is None or cut is None:
        detail = f"{job.job_id} is a served model, and no ring trains it"
        fix = "export the job that trained it"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=fix)
    if stored_round is None:
        detail = f"no round of {job.job_id} is stored yet"
        raise HyperGPUError(Reason.MODEL_MISSING, detail, fix=f"hypergpu job watch {job.job_id}")
    return RingAdapter(
        job=job.job_id,
        training=training,
        layers=cut.layers,
        rounds=stored_round.rounds,
        step=stored_round.step,
        loss=stored_round.loss,
        held_out_loss=stored_round.held_out_loss,
    )


def _card(model: str, adapter: RingAdapter) -> str:
    """What a person should know about the files, as Markdown."""
    held_out = (
        [] if adapter.held_out_loss is None else [f"- Held-out loss {adapter.held_out_loss:.4f}"]
    )
    lines = [
        f"# {model}",
        "",
        f"A LoRA adapter, trained by HyperGPU job `{adapter.job}` through a ring of stages.",
        "",
        f"- Rounds: {adapter.rounds} of {adapter.training.rounds}",
        f"- Optimizer steps: {adapter.step}",
        f"- Loss of the last round {adapter.loss:.4f}",
        *held_out,
        "",
        "## Use",
        "",
        "```python",
        'base = AutoModelForCausalLM.from_pretrained("BASE")',
        'model = PeftModel.from_pretrained(base, "FOLDER")',
        "```",
        "",
        "## Settings",
        "",
        "```json",
        msgspec.json.format(msgspec.json.encode(adapter.training), indent=2).decode(),
        "```",
        "",
    ]
    return "\n".join(lines)
