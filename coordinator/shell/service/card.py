"""The card of an exported model: enough to rebuild it, to feed it and to judge it."""

from coordinator.core.training.job.state import Job, Model, ModelScore
from hypergpu.jobfile.reading import spec_json
from hypergpu.jobfile.spec import JobSpec
from hypergpu.tensors.layout import Layout
from hypergpu.units import several
from hypergpu.workloads.entry import WorkloadEntry
from hypergpu.workloads.installed import package_of
from hypergpu.workloads.registry import UnknownWorkloadError, find

_UNKNOWN = "as the workload's package says"


def model_card(job: Job, model: Model, layout: Layout) -> str:
    """What a person should know about the file, as Markdown."""
    spec = job.spec
    scores = [score for score in (job.score, job.best) if score and score.round == model.round]
    lines = [
        f"# {spec.name or spec.workload}",
        "",
        f"Trained by HyperGPU job `{job.job_id}` on workload `{spec.workload}`.",
        "",
        *_round_lines(spec, model.round),
        f"- Samples trained on, whole job: {job.tally.samples}",
        f"- Nodes that took part: {len(job.members)}",
        f"- Updates accepted: {job.tally.updates_accepted}, rejected: {job.tally.updates_rejected}",
        f"- Codec: {spec.codec.up} up, {spec.codec.down} down",
        f"- Model digest (BLAKE3): `{model.blob.digest}`",
        *(_score_line(score) for score in scores[:1]),
        *_kept_data_lines(job),
        *(f"- {note}" for note in job.notes),
        "",
        *_model_lines(job, layout),
        "",
        "## Use",
        "",
        *_use_lines(spec),
        "",
        "## Settings",
        "",
        "```json",
        spec_json(spec),
        "```",
        "",
    ]
    return "\n".join(lines)


def _round_lines(spec: JobSpec, rounds: int) -> list[str]:
    """Rounds that made the model; where steps are fixed also how many were stated and their size.

    Plans size rounds as they come: a planned job states samples, and its rounds are no part of
    those of its file.
    """
    if spec.strategy == "aware":
        return [f"- Rounds: {rounds}, each as planned, for {spec.stated_samples} stated samples"]
    return [
        f"- Rounds: {rounds} of {spec.training.rounds}",
        f"- Inner steps a round: {spec.training.inner_steps}",
    ]


def _score_line(score: ModelScore) -> str:
    metrics_by_name = {score.metric_name: score.metric, **score.metrics}
    metrics = ", ".join(
        f"{name} {value:.4f}" for name, value in metrics_by_name.items() if name != "loss"
    )
    sample_text = f" on {several(score.samples, 'sample')}" if score.samples else ""
    return f"- Held-out loss {score.loss:.4f}, {metrics}".rstrip(", ") + sample_text


def _kept_data_lines(job: Job) -> list[str]:
    """Where the training samples are, if they were never sent."""
    if not job.spec.data.stays_on_nodes:
        return []
    stated_samples = sum(stream.size for stream in job.streams)
    data_text = f"Training data: `{job.spec.data.name}`, which stayed on the nodes that have it"
    return [f"- {data_text}; these say that they have {several(stated_samples, 'sample')}"]


def _model_lines(job: Job, layout: Layout) -> list[str]:
    """Architecture, data and licence. The licence is the owner's to state."""
    spec = job.spec
    try:
        entry = find(spec.workload)
    except UnknownWorkloadError:
        entry = WorkloadEntry(name=spec.workload, dataset=_UNKNOWN, meaning=_UNKNOWN, builder="")
    source = f"your folder `{spec.data.path}`" if spec.data.path else entry.dataset
    tensors, parameters = len(layout.tensors), layout.parameters_count
    return [
        "## Model and data",
        "",
        f"- Architecture: {entry.meaning}; {parameters:,} parameters, {tensors} tensors",
        f"- To rebuild it: {_rebuilding(entry, job.workload_version)}",
        f"- Data: {source}",
        f"- Preprocessing: {entry.preprocessing or _UNKNOWN}",
        f"- Split: {entry.split or _UNKNOWN}",
        "- Licence: not stated; `hypergpu job publish --license` states one",
    ]


def _use_lines(spec: JobSpec) -> list[str]:
    """How a person loads the model. A program's code is with its user alone."""
    if spec.workload == "program":
        return [
            "`model.safetensors` holds all tensors by the names they have in the module:",
            "",
            "```python",
            "from safetensors.torch import load_file",
            "",
            'model.load_state_dict(load_file("model.safetensors"), strict=False)',
            "```",
            "",
            "Without the module's code, `load.py` beside this file evaluates the model by the",
            "operators in `program/`, on an `.npz` or `.parquet` file with the batches' fields.",
        ]
    folder = " FOLDER" if spec.data.path else ""
    where = ", with the job's folder of data," if spec.data.path else ""
    argument = "FOLDER" if spec.data.path else ""
    return [
        f"`python load.py{folder}` beside this file loads the model{where} and evaluates it on",
        f"held-out data; `load({argument}).model` gives it to your own code. `model.safetensors`",
        "holds all tensors by name.",
    ]


def _rebuilding(entry: WorkloadEntry, version: int) -> str:
    if entry.name == "program":
        return "the torch module that was given to hypergpu.train; tensors have its names"
    needs = package_of(entry.name) or entry.install
    needs = needs or ("hypergpu[torch]" if entry.kind == "torch" else "hypergpu")
    return f"`load.py`, with `pip install '{needs}'`, workload version {version}"
