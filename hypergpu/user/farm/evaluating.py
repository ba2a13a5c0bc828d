"""`hypergpu.evaluate`: how well a causal language model predicts texts, measured on many nodes."""

import math
import tempfile
from pathlib import Path
from typing import Any, Literal, Unpack, overload

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.farm import mapping
from hypergpu.user.farm.lm_eval_tasks import TaskEvaluation, evaluate_tasks, is_task_file

TASKS = ("perplexity",)


class TextEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What a model reaches on some texts."""

    perplexity: float
    """Exponential of the mean negative log-likelihood of a token."""
    log_likelihood: float
    """Sum over all tokens, in nats."""
    tokens: int
    items: int
    errors: int
    """Items that could not be scored, and are in no figure."""


@overload
def evaluate(
    model: str | Path,
    *,
    tasks: Literal["perplexity"] = "perplexity",
    **settings: Unpack[mapping.MapArguments],
) -> TextEvaluation: ...


@overload
def evaluate(
    model: str | Path, *, tasks: str | Path, **settings: Unpack[mapping.MapJobArguments]
) -> TaskEvaluation: ...


def evaluate(
    model: str | Path, *, tasks: str | Path = "perplexity", **settings: Any
) -> TextEvaluation | TaskEvaluation:
    """Measure a causal language model on texts, or in tasks of lm-eval, which are divided among the
    nodes. Waits.

    Args:
        model: Folder of the model, or its name in the hub's cache.
        tasks: ``perplexity``; or a task's file of lm-eval, which names its data, or a folder of
            such files.
        settings: Data and settings, see `MapArguments`; no output is left behind.

    Raises:
        HyperGPUError: As `hypergpu.map`, no item could be scored, or a task cannot be read.
    """
    arguments: dict[str, Any] = dict(settings)
    if is_task_file(tasks):
        if "data" in arguments or "out" in arguments:
            detail = "tasks of lm-eval name their data, and leave metrics alone"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="leave data and out out")
        return evaluate_tasks(Path(tasks), {**arguments, "base": str(model)})
    if tasks not in TASKS:
        detail = f"there is no task {tasks!r}"
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID, detail, fix=f"take {', '.join(TASKS)}, or a task's .yaml file"
        )
    with tempfile.TemporaryDirectory(prefix="hypergpu-") as folder:
        arguments |= {"out": Path(folder) / "scores.jsonl", "base": str(model)}
        return evaluation_of(mapping.map("score", **arguments).wait().out)


def evaluation_of(scores: Path) -> TextEvaluation:
    """The figures of an output of the kind ``score``.

    Raises:
        HyperGPUError: JOB_UNSUCCESSFUL, no item could be scored.
    """
    sums: list[float] = []
    tokens = errors = 0
    with scores.open("rb") as lines:
        for line in lines:
            row = msgspec.json.decode(line)
            if row.get("error"):
                errors += 1
                continue
            sums.append(row["log_likelihood"])
            tokens += row["tokens"]
    if not tokens:
        detail = f"none of the {errors} items could be scored"
        raise HyperGPUError(Reason.JOB_UNSUCCESSFUL, detail, fix="see why: hypergpu map score")
    log_likelihood = math.fsum(sums)
    return TextEvaluation(
        perplexity=math.exp(min(700.0, -log_likelihood / tokens)),
        log_likelihood=log_likelihood,
        tokens=tokens,
        items=len(sums) + errors,
        errors=errors,
    )
