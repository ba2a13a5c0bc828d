"""Whether a metric falls or rises as a model learns: by its name, or as a user says."""

import re

FALLS, RISES = "min", "max"
BY_NAME = "name"
TARGET_MODES = (BY_NAME, FALLS, RISES)
"""What a job says of its metric; the first leaves it to the metric's name."""
_FALLING = frozenset(
    {"loss", "perplexity", "ppl", "mae", "mse", "rmse", "mape", "smape", "wape", "msle", "rmsle"}
    | {"error", "errors", "err", "wer", "cer", "ter", "per", "der", "eer", "mer", "nll", "bpb"}
    | {"bpc", "ece", "mce", "brier", "fid", "kid", "lpips", "hinge", "entropy", "crossentropy"}
    | {"xent", "kl", "kld", "divergence", "distance", "deviation", "residual", "regret", "cost"}
    | {"mad", "medae", "misclassification", "fpr", "fnr", "epe", "hausdorff", "surprisal"}
)
_RISING = frozenset(
    {"accuracy", "acc", "f1", "fbeta", "auc", "auroc", "auprc", "roc", "r2", "precision"}
    | {"recall", "sensitivity", "specificity", "iou", "miou", "jaccard", "dice", "map", "ap"}
    | {"ndcg", "mrr", "bleu", "sacrebleu", "chrf", "rouge", "rouge1", "rouge2", "rougel", "meteor"}
    | {"psnr", "ssim", "kappa", "mcc", "score", "top1", "top5", "hits", "hit", "correlation"}
    | {"pearson", "spearman", "kendall", "reward", "likelihood", "em", "tpr", "tnr", "win"}
    | {"agreement", "coverage", "purity", "nmi", "ari", "variance", "correct"}
)
_OLD_FALLING = frozenset({"loss", "perplexity"})
"""All that fell before a job stated it: what journals of then were decided by."""


def direction(name: str) -> str:
    """``min`` where a metric of this name falls as a model learns, ``max`` where it rises; empty:
    its name does not say.

    A word that falls counts before one that rises: ``top5_error`` and ``dice_loss`` fall.
    """
    words = re.findall(r"[a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    joined_words = "".join(words)
    if joined_words == "loglikelihood" or words[-2:] == ["log", "likelihood"]:
        return FALLS if "negative" in words else RISES
    if _FALLING.intersection((*words, joined_words)):
        return FALLS
    if _RISING.intersection((*words, joined_words)):
        return RISES
    plain = re.sub(r"\d+$", "", joined_words)
    for suffix in ("loss", "error", "entropy"):
        if plain.endswith(suffix):
            return FALLS
    return RISES if plain.endswith(("accuracy", "score")) else ""


def target_mode(stated: str, by_name: str) -> str:
    """Whether the metric falls or rises, as a job states it, else by its name."""
    return by_name if stated == BY_NAME else stated


def has_reached(target: float, metric: float, *, name: str, mode: str = "") -> bool:
    """Whether a metric is at the target or beyond it; a target of 0 never is.

    Args:
        target: The job's.
        metric: Its value.
        name: Its name.
        mode: ``min`` or ``max``; empty: the rule of jobs that do not state it.
    """
    if not target:
        return False
    is_falling = mode == FALLS if mode else name in _OLD_FALLING
    return metric <= target if is_falling else metric >= target
