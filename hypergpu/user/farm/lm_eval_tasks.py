"""Tasks of lm-eval, a user's own files, whose requests are items on many nodes.

The library reads the tasks, writes the prompts and counts the metrics, on the user's machine; what
a model says is asked by farm jobs of the kinds `score` and `generate`. Nodes need nothing of it.
"""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hypergpu.errors import HyperGPUError, Reason, missing_extra
from hypergpu.user.farm import mapping

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

TASK_SUFFIXES = frozenset({".yaml", ".yml"})
_NEW_TOKENS = 256
"""Tokens of an answer where a task states none, as lm-eval's own models have it."""
_DRAWS = ("temperature", "top_p", "top_k")


class TaskEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What a model reaches in tasks."""

    metrics: Mapping[str, Mapping[str, float]]
    """Values by task and metric, named as lm-eval names them, such as ``acc,none``."""
    samples: Mapping[str, int]
    """Documents by task."""


def is_task_file(tasks: str | Path) -> bool:
    """Whether tasks are files of lm-eval: one, or a folder of them."""
    path = Path(tasks)
    return path.suffix in TASK_SUFFIXES or path.is_dir()


def evaluate_tasks(
    tasks: Path, arguments: Mapping[str, Any], limit: int | None = None
) -> TaskEvaluation:
    """Evaluate a model in a user's tasks. Waits.

    Args:
        tasks: A task's file, or a folder of them. What they name as functions runs here.
        arguments: What `hypergpu.map` takes beside kind, data and output.
        limit: Documents of each task; None: all.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is no task, or it cannot be read; MACHINE_UNFIT, lm-eval
            is not installed; as of `hypergpu.map`.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from error
    names = task_names(tasks)
    folder = tasks if tasks.is_dir() else tasks.parent
    try:
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        evaluation = simple_evaluate(
            model=farm_model(arguments),
            tasks=names,
            task_manager=manager,
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
        )
    except HyperGPUError:
        raise
    except Exception as error:  # a task may raise anything over its file and its data
        detail = f"lm-eval cannot evaluate {', '.join(names)}: {str(error)[:500]}"
        fix = f"mend the task or its data; it is read from {folder}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix) from error
    return TaskEvaluation(
        metrics={
            task: {name: float(value) for name, value in values.items() if _is_metric(name, value)}
            for task, values in evaluation["results"].items()
        },
        samples={
            task: int(counts["effective"]) for task, counts in evaluation["n-samples"].items()
        },
    )


def _is_metric(name: str, value: object) -> bool:
    return "," in name and "_stderr" not in name and isinstance(value, int | float)


def task_names(tasks: Path) -> list[str]:
    """Names of the tasks that files define, in order of the files.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is none.
    """
    paths = sorted(tasks.iterdir()) if tasks.is_dir() else [tasks]
    lines = (
        line
        for path in paths
        if path.suffix in TASK_SUFFIXES and path.is_file()
        for line in path.read_text("utf-8", "replace").splitlines()
    )
    names = [
        line.partition(":")[2].strip().strip("'\"") for line in lines if line.startswith("task:")
    ]
    if not names:
        detail = f"{tasks} holds no task of lm-eval"
        fix = "give a .yaml file with a line 'task: NAME', or a folder of such files"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
    return names


def farm_model(arguments: Mapping[str, Any]) -> Any:
    """A model of lm-eval whose requests are farm jobs.

    Args:
        arguments: What `hypergpu.map` takes beside kind, data and output.
    """
    from lm_eval.api.model import LM

    class FarmModel(LM):  # type: ignore[misc, unused-ignore]
        """Asks nodes. See `lm_eval.api.model.LM`."""

        def loglikelihood(self, requests: "list[Instance]") -> list[tuple[float, bool]]:
            """Log-likelihoods of continuations, and whether each is the likeliest one."""
            pairs = [_scored_pair(*request.args) for request in requests]
            rows = _rows("score", pairs, arguments, {"begin_context": False})
            return [(float(row["log_likelihood"]), bool(row["is_greedy"])) for row in rows]

        def loglikelihood_rolling(self, requests: "list[Instance]") -> list[float]:
            """Log-likelihoods of whole texts."""
            rows = _rows("score", [request.args[0] for request in requests], arguments, {})
            return [float(row["log_likelihood"]) for row in rows]

        def generate_until(self, requests: "list[Instance]") -> list[str]:
            """Answers, each cut before the first text at which it is to stop."""
            answers = [""] * len(requests)
            for settings, places in _places_by_settings([each.args[1] for each in requests]):
                prompts = [requests[place].args[0] for place in places]
                rows = _rows("generate", prompts, arguments, settings)
                for place, row in zip(places, rows, strict=True):
                    answers[place] = _cut_before(row["text"], requests[place].args[1])
            return answers

    return FarmModel()


def _scored_pair(context: str, continuation: str) -> Any:
    """The item of a pair. Spaces at a context's end belong to the continuation, as in lm-eval."""
    if not context:
        return continuation
    stripped_context = context.rstrip()
    if not stripped_context:
        return {"context": context, "continuation": continuation}
    spaces = context[len(stripped_context) :]
    return {"context": stripped_context, "continuation": spaces + continuation}


def _places_by_settings(
    asked: Sequence[Mapping[str, Any]],
) -> list[tuple[dict[str, Any], list[int]]]:
    """Places of requests that have the same settings of `generate`: each is a job."""
    keys = [_writing_settings(each) for each in asked]
    order = sorted(range(len(keys)), key=lambda place: sorted(keys[place].items()))
    return [
        (settings, list(places))
        for settings, places in itertools.groupby(order, key=lambda place: keys[place])
    ]


def _writing_settings(asked: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "max_new_tokens": int(
            asked.get("max_gen_toks") or asked.get("max_new_tokens") or _NEW_TOKENS
        )
    }
    if asked.get("do_sample") and float(asked.get("temperature", 0.0)) > 0:
        settings |= {name: asked[name] for name in _DRAWS if name in asked}
    return settings


def _cut_before(text: str, asked: Mapping[str, Any]) -> str:
    stops = asked.get("until") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        if stop:
            text = text.partition(stop)[0]
    return text


def _rows(
    kind: str, items: Sequence[Any], arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Values of items, in order.

    Raises:
        HyperGPUError: JOB_UNSUCCESSFUL, an item has none: metrics over the others are others.
    """
    parameters = {**arguments.get("parameters", {}), **settings}
    source_rows = [each if isinstance(each, dict) else {"text": each} for each in items]
    with tempfile.TemporaryDirectory(prefix="hypergpu-") as folder:
        out = Path(folder) / "values.jsonl"
        run = mapping.map(
            kind, **{**arguments, "data": source_rows, "out": out, "parameters": parameters}
        )
        rows = [msgspec.json.decode(line) for line in run.wait().out.read_bytes().splitlines()]
    for place, row in enumerate(rows):
        if row.get("error"):
            detail = f"request {place} of the tasks has no value: {row['error']}"
            fix = "shorten the task's documents, or take a base of a longer context"
            raise HyperGPUError(Reason.JOB_UNSUCCESSFUL, detail, fix=fix)
    return rows
