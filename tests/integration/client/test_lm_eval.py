"""A task of lm-eval over many nodes gives what lm-eval's own model gives."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import hypergpu
from hypergpu.errors import HyperGPUError
from hypergpu.user.client import Coordinator
from hypergpu.user.farm.lm_eval_tasks import TaskEvaluation, task_names
from tests.processes import Cluster
from tests.tiny_bases import save_base

CHOICES = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {form}
doc_to_text: "{{{{question}}}} "
doc_to_target: "{{{{answer}}}}"
"""
CHOOSING = """
doc_to_choice: "{{choices}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WRITING = """
generation_kwargs:
  until: ["5", "."]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
"""


def write_tasks(folder: Path) -> Path:
    """Two tasks over twelve documents of their own: to choose, and to write."""
    folder.mkdir()
    rows = [
        {
            "question": f"number {number} comes before number",
            "choices": [str(number + 1), str(number), "counting means"],
            "answer": number % 3,
        }
        for number in range(12)
    ]
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    heads = {"multiple_choice": CHOOSING, "generate_until": WRITING}
    for form, rest in heads.items():
        text = CHOICES.format(name=f"own_{form}", data=documents, form=form) + rest
        (folder / f"{form}.yaml").write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    with Cluster(tmp_path_factory.mktemp("lm-eval"), is_plaintext=False) as cluster:
        cluster.add_nodes(2, "torch", kinds=("training", "score", "generate"))
        with cluster.client() as client:
            yield client


# lm-eval and its model of transformers take a minute of processor time to import and to run.
@pytest.mark.full
def test_own_tasks_give_what_lm_evals_own_model_gives(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks, base = write_tasks(tmp_path / "tasks"), save_base(tmp_path)
    evaluation = hypergpu.evaluate(base, tasks=tasks, coordinator=coordinator, checks=0.0)
    assert isinstance(evaluation, TaskEvaluation)
    plain = simple_evaluate(
        model=HFLM(pretrained=str(base), device="cpu", dtype="float32", batch_size=4),
        tasks=task_names(tasks),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )["results"]
    assert evaluation.metrics.keys() == {"own_generate_until", "own_multiple_choice"}
    for task, metrics in evaluation.metrics.items():
        assert metrics
        for name, value in metrics.items():
            assert value == pytest.approx(plain[task][name]), (task, name)
    assert 0 < evaluation.metrics["own_multiple_choice"]["acc,none"] < 1
    assert set(evaluation.samples.values()) == {12}


def test_files_that_are_no_tasks_are_refused_by_the_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # datasets looks for the data of a task that names none below the working folder.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.yaml").write_text("dataset_path: json\n", "utf-8")
    with pytest.raises(HyperGPUError, match="holds no task of lm-eval"):
        hypergpu.evaluate("base", tasks=tmp_path / "task.yaml")
    (tmp_path / "task.yaml").write_text("task: broken\ndataset_path: json\n", "utf-8")
    with pytest.raises(HyperGPUError, match="lm-eval cannot evaluate broken"):
        hypergpu.evaluate("base", tasks=tmp_path)
    with pytest.raises(HyperGPUError, match="name their data"):
        hypergpu.evaluate("base", tasks=tmp_path, out=tmp_path / "metrics.jsonl")
    with pytest.raises(HyperGPUError, match=r"or a task's \.yaml file"):
        hypergpu.evaluate("base", tasks="arc_easy")
