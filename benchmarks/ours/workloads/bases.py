"""Adapters of many kinds of bases: whether each trains, packs, merges and is measured as plain
transformers would, or is refused.
"""

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from torch.nn import functional as F

from benchmarks.ours.table import PartFigures
from benchmarks.ours.workloads.base_kinds import ALL, BaseKind
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.finetuning.export import merged_model
from hypergpu.workloads.finetuning.rows import read_rows
from hypergpu.workloads.networks.exported import TrainedModel
from hypergpu.workloads.registry import build_for_job, find

TOLERANCE = 1e-4
_STEPS = 8
_RATE = 0.02
_LENGTH = 64
_LOSS_LEAST = 0.01
"""A classifier's loss below it is compared as if it were this."""
_QUICK = ("Llama, tied", "OPT", "Lfm2", "Bloom", "DebertaV2", "ResNet")
_LABELS = ("dark", "light")


class BaseOutcome(NamedTuple):
    """What became of a base; differences are relative."""

    name: str
    refusal: str = ""
    is_packed: bool = False
    loss_first: float = 0.0
    loss_last: float = 0.0
    packed_off: float = 0.0
    """Loss of packed rows against the same rows alone."""
    merged_off: float = 0.0
    """Outputs of the merged model, as transformers loads it, against the adapter's."""
    plain_off: float = 0.0
    """Held-out perplexity (or loss of a classifier) against plain transformers."""

    @property
    def is_right(self) -> bool:
        """Whether it trains and agrees everywhere."""
        off = max(self.packed_off, self.merged_off, self.plain_off)
        return not self.refusal and self.loss_last < self.loss_first and off <= TOLERANCE


def base_figures(*, is_quick: bool) -> PartFigures:
    """Try every kind, or a few of them."""
    torch.set_num_threads(1)
    kinds = [each for each in ALL if not is_quick or each.name in _QUICK]
    outcomes = [try_base(each) for each in kinds]
    rows = [_row(each) for each in outcomes]
    metrics = {
        "bases_supported": float(sum(each.is_right for each in outcomes)),
        "bases_refused": float(sum(bool(each.refusal) for each in outcomes)),
        "bases_wrong": float(sum(not each.is_right and not each.refusal for each in outcomes)),
        "bases_packed": float(sum(each.is_packed for each in outcomes)),
    }
    note = (
        f"Random weights, {_STEPS} steps of AdamW on the adapter. Columns: loss before and after;"
        " packed against alone; merged, loaded by transformers, against the adapter; held-out"
        f" perplexity against plain transformers. Right: at most {TOLERANCE:g} each."
    )
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


def _row(found: BaseOutcome) -> list[str]:
    if found.refusal:
        return [found.name, "", "", "", f"refused: {found.refusal}"]
    packed_text = f"{found.packed_off:.0e}" if found.is_packed else "not packed"
    return [
        found.name,
        f"{found.loss_first:.2f} to {found.loss_last:.2f}",
        packed_text,
        f"{found.merged_off:.0e}",
        f"{found.plain_off:.0e}" + ("" if found.is_right else " WRONG"),
    ]


def try_base(kind: BaseKind, *, targets: str = "all-linear") -> BaseOutcome:
    """Save a base of a kind, train its adapter a few steps and compare."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' advice on kernels, peft's on layers
        job = Path(place)
        kind.save(job / "base")
        write_samples(kind, job)
        try:
            return _try_saved(kind, job, targets)
        except DatasetError as error:
            return BaseOutcome(kind.name, refusal=str(error))


def write_samples(kind: BaseKind, job: Path) -> None:
    """Rows whose answers follow from their questions, or images by brightness."""
    if kind.workload == "hf-image-classifier":
        for name, grey in zip(_LABELS, (40, 200), strict=True):
            (job / "images" / name).mkdir(parents=True)
            for number in range(10):
                image = np.full((32, 32, 3), grey + number, np.uint8)
                Image.fromarray(image).save(job / "images" / name / f"{number}.png")
        return
    rows: list[dict[str, str]] = []
    for number in range(48):
        words = " ".join(f"w{(number * 7 + place) % 90}" for place in range(3 + number % 5))
        if kind.workload == "hf-causal-lm":
            rows.append({"prompt": words, "completion": f" w{number % 4} w{number % 3 + 90}"})
        else:
            rows.append({"text": words + f" w{90 + number % 2}", "label": _LABELS[number % 2]})
    lines = "\n".join(map(json.dumps, rows))
    (job / "train.jsonl").write_text(lines, encoding="utf-8")


def _workload(kind: BaseKind, job: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"rank": 4, "sequence_length": _LENGTH, **changes}
    if kind.workload != "hf-causal-lm":
        options |= {"labels": ",".join(_LABELS)}
    if kind.workload == "hf-image-classifier":
        options.pop("sequence_length")
    return build_for_job(find(kind.workload), options, str(job))


def _try_saved(kind: BaseKind, job: Path, targets: str) -> BaseOutcome:
    workload = _workload(kind, job, targets=targets)
    dataset, model = workload.load(str(job)), workload.model().eval()
    plain_off = _perplexity_off(kind, workload, model, dataset.test, job)
    losses = _train(workload, model.train(), dataset.train)
    model.eval()
    packed_off, is_packed = _packed_off(kind, workload, model, dataset.train, job)
    sums = _measure(workload, model, dataset.test)
    merged_model, merged_off = _load_merged(kind, workload, model, job)
    if kind.workload != "hf-causal-lm":
        plain = _plain_judgement(kind, merged_model, dataset.test, job)
        plain_off = abs(sums.loss / sums.samples - plain) / max(plain, _LOSS_LEAST)
    return BaseOutcome(
        kind.name, "", is_packed, losses[0], losses[-1], packed_off, merged_off, plain_off
    )


def _fields(samples: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(each) for each in samples.batch(np.arange(len(samples.labels)))]


def _train(workload: Any, model: torch.nn.Module, samples: Any) -> list[float]:
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer, fields = torch.optim.AdamW(parameters, lr=_RATE), _fields(samples)
    losses = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss = workload.loss(model, *fields)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _measure(workload: Any, model: torch.nn.Module, samples: Any) -> Sums:
    with torch.inference_mode():
        sums: Sums = workload.evaluate(model, *_fields(samples))
    return sums


def _packed_off(
    kind: BaseKind, workload: Any, model: torch.nn.Module, samples: Any, job: Path
) -> tuple[float, bool]:
    """How far the loss of packed rows is from that of the same rows alone."""
    if kind.workload != "hf-causal-lm":
        return 0.0, False
    alone = _workload(kind, job, packing=False)
    others = alone.load(str(job)).train
    packed_sums, apart = _measure(workload, model, samples), _measure(alone, model, others)
    is_packed = len(samples.labels) < len(others.labels)
    if packed_sums.samples != apart.samples:
        raise AssertionError("both predict the same tokens")
    return abs(packed_sums.loss - apart.loss) / apart.loss, is_packed


def _load_merged(kind: BaseKind, workload: Any, model: Any, job: Path) -> tuple[Any, float]:
    """A merged model as transformers loads it, and how far it is from its adapter."""
    before = workload.trial_logits(model)
    folder = job / "merged"
    merged_model(TrainedModel(kind.workload, workload, model)).save_pretrained(folder)
    model_after = workload.auto.from_pretrained(folder).eval()
    after = workload.trial_logits(lambda **inputs: model_after(**inputs).logits)
    return model_after, float((after - before).abs().max() / before.abs().max())


def _perplexity_off(
    kind: BaseKind, workload: Any, model: torch.nn.Module, samples: Any, job: Path
) -> float:
    """How far the held-out perplexity is from that of the base by transformers alone."""
    if kind.workload != "hf-causal-lm":
        return 0.0
    sums = _measure(workload, model, samples)
    plain = transformers.AutoModelForCausalLM.from_pretrained(job / "base").eval()
    perplexity = float(np.exp(_plain_loss(plain, job)))
    return abs(sums.metric("perplexity") - perplexity) / perplexity


def _plain_judgement(kind: BaseKind, model: Any, samples: Any, job: Path) -> float:
    """Mean loss of a loaded classifier, one sample after the other."""
    losses = []
    with torch.inference_mode():
        if kind.workload == "hf-image-classifier":
            for pixels, target in zip(*samples.batch(np.arange(len(samples.labels))), strict=True):
                inputs = torch.from_numpy(pixels)[None].float() / 127.5 - 1
                losses.append(_cross_entropy(model(pixel_values=inputs).logits, int(target)))
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(job / "base")
            for row in read_rows(job).held_out:
                inputs = tokenizer(row.values["text"], return_tensors="pt")["input_ids"]
                target = _LABELS.index(row.values["label"])
                losses.append(_cross_entropy(model(input_ids=inputs).logits, target))
    return float(np.mean(losses))


def _cross_entropy(logits: torch.Tensor, target: int) -> float:
    return float(F.cross_entropy(logits.float(), torch.tensor([target])))


def _plain_loss(model: Any, job: Path) -> float:
    """Mean loss of the answers' tokens and ends, a row at a time."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(job / "base")
    total, count = 0.0, 0
    for row in read_rows(job).held_out:
        prompt, answer = row.values["prompt"], row.values["completion"]
        start = len(tokenizer(prompt)["input_ids"])
        numbers = [*tokenizer(prompt + answer)["input_ids"], tokenizer.eos_token_id]
        tokens = torch.tensor([numbers])
        with torch.inference_mode():
            logits = model(input_ids=tokens).logits[0, :-1].float()
        losses = F.cross_entropy(logits, tokens[0, 1:], reduction="none")[start - 1 :]
        total, count = total + float(losses.sum()), count + len(losses)
    return total / count
