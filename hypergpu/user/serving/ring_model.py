"""`hypergpu.finetune_ring`: a base that no node holds is fine-tuned by several, which answer."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.serving.model import ServedModel
from hypergpu.user.serving.ring_file import WORKLOAD, ring_job
from hypergpu.user.serving.ring_submitting import submit_ring
from hypergpu.user.serving.starting import model_named
from hypergpu.user.terminal.output import note, progress_bars
from hypergpu.user.training.bases import find_base, link_base
from hypergpu.user.training.connecting import connect_until_exit
from hypergpu.user.training.finetune import FinetuneArguments, write_parts
from hypergpu.user.training.train import job_spec
from hypergpu.workloads.finetuning.rows import base_digest


def finetune_ring(
    base: str | Path,
    *,
    stages: int | Mapping[str, Any],
    **settings: Unpack[FinetuneArguments],
) -> ServedModel:
    """Send a base in layers and its rows, and start training an adapter through a ring of nodes.

    Returns as soon as the data are there. The model answers once it is trained; until then calls
    are refused with how far it is.

    Args:
        base: Folder of a model as ``save_pretrained`` writes it, or its name on the hub.
        stages: Nodes that hold it together, or the table ``[stages]`` of a job file, such as
            ``{"count": 3, "codec": "float32"}``.
        settings: As of `hypergpu.finetune`, without what a ring has no use for.

    Raises:
        HyperGPUError: Base, rows or settings cannot be used, or the job is refused.
    """
    folder = find_base(base, allow_hub=settings.get("allow_hub", False))
    if settings.get("workload", WORKLOAD) != WORKLOAD:
        detail = f"a ring trains no {settings['workload']}"
        raise HyperGPUError(Reason.SPEC_INVALID, detail, fix=f"leave workload out: {WORKLOAD}")
    if settings.get("sinks"):
        fix = "leave sinks out, and log by hypergpu job watch JOB --log SINK"
        raise HyperGPUError(Reason.SPEC_INVALID, "finetune_ring takes no sinks", fix=fix)
    options = {"base_digest": base_digest(folder), **settings.get("options", {})}
    arguments: dict[str, Any] = {
        name: each
        for name, each in settings.items()
        if name not in {"options", "workload", "allow_hub"}
    }
    keys = {
        **settings.get("settings", {}),
        **{f"options.{name}": value for name, value in options.items()},
    }
    arguments["settings"] = keys
    spec = job_spec(arguments, workload=WORKLOAD)  # type: ignore[arg-type]
    unused_names = {"strategy"} & settings.keys()
    stated_keys = dict.fromkeys((*unused_names, *(key.partition(".")[0] for key in keys)))
    table = {"count": stages} if isinstance(stages, int) else dict(stages)
    coordinator = settings.get("coordinator") or connect_until_exit()
    with tempfile.TemporaryDirectory(prefix="hypergpu-") as scratch, progress_bars() as report:
        job = ring_job(spec, table, Path(scratch), stated=stated_keys)
        link_base(folder, Path(scratch))
        write_parts(Path(scratch), WORKLOAD, settings["data"], settings.get("held_out"))
        name = job.name or folder.name
        job_id = submit_ring(coordinator, job._replace(name=name), report=report, tell=note)
    return ServedModel(coordinator, job_id, model_named(coordinator, job_id).model)
