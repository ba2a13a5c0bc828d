"""Metrics over all held-out samples: traced, bounded, and equal to scikit-learn's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from hypergpu.programs.checks import check_program, parse_program
from hypergpu.programs.container import PROGRAM_PATH, VERSION, ProgramError, program_bytes
from hypergpu.workloads.digits import digits
from hypergpu.workloads.networks.program import ProgramWorkload
from tests.program_folders import write_checked
from tests.whole_set import digits_metrics, digits_parts

Outputs = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder with digits, to read only."""
    data_folder = tmp_path_factory.mktemp("digits")
    torch.manual_seed(3)
    write_checked(
        data_folder,
        nn.Linear(64, 10),
        scores_loss,
        digits_parts()[1],
        evaluate_all=digits_metrics,
    )
    return data_folder


def scores_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    logits = model(batch["image"])
    loss = F.cross_entropy(logits, batch["digit"])
    hits = (logits.argmax(1) == batch["digit"]).float().mean()
    return loss, {"accuracy": hits}, {"scores": logits.softmax(1), "digit": batch["digit"]}


def plain_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return scores_loss(model, batch)[:2]


def test_f1_and_auc_of_all_samples_are_those_of_scikit_learn(folder: Path) -> None:
    # Imported here: it takes a second of each process that collects the tests.
    from sklearn.metrics import f1_score, roc_auc_score

    workload = ProgramWorkload(folder)
    evaluator = TorchEvaluator(workload, "")
    sums = evaluator.evaluate(evaluator.initial(0))
    _, test, _ = digits()
    images, labels = test.batch(np.arange(len(test.labels)))
    with torch.no_grad():
        model = workload.model().eval()
        weight, bias = dict(model.named_parameters()).values()
        scores = F.linear(torch.from_numpy(images), weight, bias).softmax(1).numpy()
    assert workload.metric == "f1"
    assert [*sums.metrics] == ["f1", "auc", "accuracy"]
    expected_score = f1_score(labels, scores.argmax(1), average="macro")
    assert sums.metric("f1") == pytest.approx(expected_score, rel=1e-5)
    expected_score = roc_auc_score(labels, scores, multi_class="ovr", average="macro")
    assert sums.metric("auc") == pytest.approx(expected_score, rel=1e-5)
    assert sums.metric("accuracy") == pytest.approx((scores.argmax(1) == labels).mean())


def test_a_part_of_the_samples_is_measured_between(folder: Path) -> None:
    evaluator = TorchEvaluator(ProgramWorkload(folder), "")
    model = evaluator.initial(0)
    few, all_samples = evaluator.evaluate(model, 90), evaluator.evaluate(model)
    assert few.samples == 89 < all_samples.samples == 355
    assert few.metric("f1") != all_samples.metric("f1")


def test_nodes_are_asked_for_nothing_of_it(folder: Path) -> None:
    program = parse_program((folder / PROGRAM_PATH).read_bytes())
    assert program.version == VERSION
    assert program.evaluate_all is not None
    own = {call.operator for call in program.evaluate_all.graph.calls}
    assert "aten.argsort.stable" in own or "aten.sort.stable" in own or "aten.sort.default" in own
    assert not own & {"aten.cumsum.default"} & {*program.operators}


def test_a_program_without_it_keeps_the_version_that_older_nodes_train(tmp_path: Path) -> None:
    traced_program = write_checked(tmp_path, nn.Linear(64, 10), plain_loss, digits_parts()[1])
    assert traced_program.program.version == 2
    assert b"evaluate_all" not in program_bytes(traced_program.program)
    for version in (2, 3):
        older = msgspec.structs.replace(traced_program.program, version=version)
        (tmp_path / PROGRAM_PATH).write_bytes(program_bytes(older))
        evaluator = TorchEvaluator(ProgramWorkload(tmp_path), "")
        sums = evaluator.evaluate(evaluator.initial(0))
        assert [*sums.metrics] == ["accuracy"]
        assert evaluator.version == version


def test_older_versions_have_none(folder: Path) -> None:
    program = parse_program((folder / PROGRAM_PATH).read_bytes())
    older = msgspec.structs.replace(program, version=3)
    with pytest.raises(ProgramError, match="a program of version 3 has none"):
        check_program(older)


def flat_outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    loss, metrics, outputs = scores_loss(model, batch)
    return loss, metrics, {"scores": outputs["scores"].flatten()}


def mean_outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    loss, metrics, outputs = scores_loss(model, batch)
    return loss, metrics, {"scores": outputs["scores"].mean()}


def number_outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    loss, metrics, _ = scores_loss(model, batch)
    return loss, metrics, {"count": 3}


def gives_top(outputs: Outputs) -> dict[str, Tensor]:
    return {"top": outputs["scores"].max()}


def gives_accuracy(outputs: Outputs) -> dict[str, Tensor]:
    return {"accuracy": (outputs["scores"].argmax(1) == outputs["digit"]).float().mean()}


def gives_items(outputs: Outputs) -> dict[str, Any]:
    return {"top": outputs["scores"].max().item()}


def gives_rows(outputs: Outputs) -> dict[str, Tensor]:
    return {"top": outputs["scores"].amax(1)}


def gives_nothing(_outputs: Outputs) -> dict[str, Tensor]:
    return {}


def gives_a_tensor(outputs: Outputs) -> Any:
    return outputs["scores"].max()


def decides_by_values(outputs: Outputs) -> dict[str, Tensor]:
    scores = outputs["scores"]
    return {"top": scores.max() if scores.sum() > 0 else scores.min()}


def takes_a_wrong_output(outputs: Outputs) -> dict[str, Tensor]:
    return {"top": outputs["logits"].max()}


def leaves_torch(outputs: Outputs) -> dict[str, Tensor]:
    return {"top": torch.tensor(outputs["scores"].numpy().max())}


def fixes_the_size(outputs: Outputs) -> dict[str, Tensor]:
    size = int(outputs["scores"].shape[0])
    return {"top": outputs["scores"].view(-1, 9, 10).max() if size % 9 == 0 else torch.zeros(())}


def counts_unbounded(outputs: Outputs) -> dict[str, Tensor]:
    return {"most": torch.bincount(outputs["digit"]).max().float()}


def takes_strides(outputs: Outputs) -> dict[str, Tensor]:
    return {"top": outputs["scores"].as_strided((2,), (1,)).max()}


def changes_in_place(outputs: Outputs) -> dict[str, Tensor]:
    return {"top": outputs["scores"].mul_(2).max()}


def has_a_bad_name(outputs: Outputs) -> dict[str, Tensor]:
    return {"Top 1": outputs["scores"].max()}


HERE = r"\(.*test_evaluate_all.py:\d+: "


@pytest.mark.parametrize(
    ("loss", "evaluate_all", "said"),
    [
        (plain_loss, gives_top, r"the loss gives none in evaluation. Fix: return loss, \{\}, \{"),
        (flat_outputs, gives_top, r"output scores has shape \[90\], .* be the batch's 9 samples"),
        (mean_outputs, gives_top, r"output scores has shape \[\], .* be the batch's 9 samples"),
        (number_outputs, gives_top, "nor these and outputs, each a tensor"),
        (scores_loss, gives_accuracy, "both give a metric called accuracy. Fix: rename one"),
        (scores_loss, gives_items, r"gives top as a float, and no tensor.*without item\(\)"),
        (scores_loss, gives_rows, r"gives top with shape \[9\], and a metric is one number"),
        (scores_loss, gives_nothing, "gives an empty dictionary, and no metrics by name"),
        (scores_loss, gives_a_tensor, "gives a Tensor, and no metrics by name"),
        (scores_loss, decides_by_values, f"decides by a tensor's values {HERE}.*torch.where$"),
        (scores_loss, takes_a_wrong_output, f"itself fails {HERE}.*KeyError.* scores float32"),
        (scores_loss, leaves_torch, f"leaves torch for numpy {HERE}"),
        (scores_loss, fixes_the_size, f"fixes the number of samples {HERE}"),
        (scores_loss, counts_unbounded, f"{HERE}.*Fix: torch.bincount.x, minlength=classes"),
        (scores_loss, takes_strides, f"evaluate_all calls aten.as_strided.default.*{HERE}"),
        (scores_loss, changes_in_place, f"changes what it is given in place {HERE}"),
        (scores_loss, has_a_bad_name, "a metric cannot be called 'Top 1'"),
    ],
)
def test_what_is_no_metric_of_all_samples_is_told_with_its_line(
    loss: Any, evaluate_all: Callable[[Outputs], Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ProgramError, match=said):
        write_checked(
            tmp_path, nn.Linear(64, 10), loss, digits_parts()[1], evaluate_all=evaluate_all
        )


def wide_outputs(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    loss, metrics, outputs = scores_loss(model, batch)
    return loss, metrics, {"wide": outputs["scores"][:, :1].expand(-1, 1 << 18).clone()}


def compares_all(outputs: Outputs) -> dict[str, Tensor]:
    scores = outputs["scores"].flatten()
    return {"gap": (scores[:, None] - scores[None, :]).abs().max()}


def takes_the_first(outputs: Outputs) -> dict[str, Tensor]:
    return {"first": next(iter(outputs.values())).max()}


def test_outputs_are_bounded_before_anything_is_computed(tmp_path: Path) -> None:
    pattern = (
        r"355 held-out samples take 355 MiB, and evaluate_all takes 256 MiB\. Fix: give smaller"
    )
    with pytest.raises(ProgramError, match=pattern):
        write_checked(
            tmp_path,
            nn.Linear(64, 10),
            wide_outputs,
            digits_parts()[1],
            evaluate_all=takes_the_first,
        )


def test_what_is_computed_of_them_is_bounded_too(tmp_path: Path) -> None:
    rows = digits_parts()[1]
    many = {name: np.concatenate([each] * 8) for name, each in rows.items()}
    pattern = (
        rf"{HERE}.*evaluate_all has 2.0 GiB of memory, with 2,840 held-out samples\. Fix: sort"
    )
    with pytest.raises(ProgramError, match=pattern):
        write_checked(tmp_path, nn.Linear(64, 10), scores_loss, many, evaluate_all=compares_all)


WEIGHTS = torch.tensor([1.0, 2.0])


def sorting(outputs: Outputs) -> dict[str, Tensor]:
    """Every operator of ranks and counts, and constants of the function's own."""
    scores, digit = outputs["scores"][:, 0].contiguous(), outputs["digit"]
    values, order = scores.sort()
    ranks = torch.searchsorted(values, scores)
    counts = torch.bincount(digit, minlength=10)
    weighted_counts = torch.bincount(digit, weights=scores, minlength=10)
    curve = digit[order].eq(0).float().cumsum(0)
    by_hand = torch.tensor([0.25, 0.75])
    return {
        "rank": ranks.double().mean(),
        "most": counts.max(),
        "heaviest": weighted_counts.max() * WEIGHTS[1],
        "area": torch.trapezoid(curve) / by_hand.sum(),
        "spread": values[torch.argsort(values, descending=True)][0],
        "median": torch.quantile(scores, 0.5),
    }


def test_ranks_and_counts_are_those_of_torch(tmp_path: Path) -> None:
    write_checked(tmp_path, nn.Linear(64, 10), scores_loss, digits_parts()[1], evaluate_all=sorting)
    workload = ProgramWorkload(tmp_path)
    evaluator = TorchEvaluator(workload, "")
    sums = evaluator.evaluate(evaluator.initial(0))
    rows = digits_parts()[1]
    with torch.no_grad():
        weight, bias = workload.model().parameters()
        scores = F.linear(torch.from_numpy(rows["image"]), weight, bias).softmax(1)
        expected_values = sorting({"scores": scores, "digit": torch.from_numpy(rows["digit"])})
    for name, value in expected_values.items():
        assert sums.metric(name) == pytest.approx(float(value), rel=1e-5)
