"""Which way a metric goes, by its name and as a job states it."""

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import Evaluation, JobSpec
from hypergpu.user.training.train import check_target
from hypergpu.workloads.metrics import FALLS, RISES, direction, has_reached


@pytest.mark.parametrize(
    "name",
    [
        *("loss", "perplexity", "mae", "MSE", "rmse", "val_loss", "wer", "cer", "error_rate"),
        *("top5_error", "dice_loss", "mean_absolute_error", "meanSquaredError", "nll", "brier"),
        *("negative_log_likelihood", "crossentropy", "fid", "kl_divergence", "bits_error"),
    ],
)
def test_errors_and_losses_fall(name: str) -> None:
    assert direction(name) == FALLS


@pytest.mark.parametrize(
    "name",
    [
        *("accuracy", "f1", "macro_f1", "f1_score", "AUC", "roc_auc", "r2", "top5_accuracy"),
        *("recall", "precision", "bleu", "rougeL", "mIoU", "log_likelihood", "score", "psnr"),
    ],
)
def test_shares_of_what_is_right_rise(name: str) -> None:
    assert direction(name) == RISES


@pytest.mark.parametrize("name", ["gap", "metric", "temperature", "m"])
def test_other_names_do_not_say(name: str) -> None:
    assert direction(name) == ""


def test_a_falling_metric_is_reached_from_above() -> None:
    assert not has_reached(1.0, 41.9, name="mae", mode=FALLS)
    assert has_reached(1.0, 0.9, name="mae", mode=FALLS)
    assert has_reached(0.9, 0.95, name="accuracy", mode=RISES)


def test_a_target_of_a_metric_whose_name_does_not_say_is_refused() -> None:
    with pytest.raises(HyperGPUError, match="name of the metric gap does not say") as failure:
        check_target(JobSpec(workload="program", evaluation=Evaluation(target=0.3)), "gap")
    assert failure.value.fix == 'give target_mode="min" where it falls, or target_mode="max"'
    check_target(
        JobSpec(workload="program", evaluation=Evaluation(target=0.3, target_mode="min")), "gap"
    )
    check_target(JobSpec(workload="program", evaluation=Evaluation(target=0.3)), "mae")
    check_target(JobSpec(workload="program"), "gap")
