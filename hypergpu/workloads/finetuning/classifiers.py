"""The workloads ``hf-text-classifier`` and ``hf-image-classifier``: an adapter, and a head that is
trained as a whole.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from hypergpu.workloads.entry import Options
from hypergpu.workloads.finetuning.adapters import AdaptedModule, AdapterPlan
from hypergpu.workloads.finetuning.base_model import (
    base_folder,
    check_base,
    load_base,
    load_config,
    load_tokenizer,
)
from hypergpu.workloads.finetuning.rows import DataRow, all_rows, read_rows
from hypergpu.workloads.networks.images import (
    Pictures,
    held_out_folder,
    node_pictures,
    read_folder,
)
from hypergpu.workloads.workload import NO_SAMPLES, Array, Dataset, DatasetError, Example, Sums

_HEADS = ("classifier", "pre_classifier", "score")
"""Names of heads in transformers."""
_TOKENS_AT_ONCE = 1 << 14
_IMAGES_AT_ONCE = 32
_GRADIENT_SAMPLES = 128
IMAGES_FOLDER = "images"
_PREPROCESSOR = "preprocessor_config.json"


class _Classifier:
    """What both kinds share: base, adapter, head, cross-entropy and correct predictions.

    Raises:
        DatasetError: The base cannot be used.
    """

    metric = "accuracy"
    gradient_samples_most = _GRADIENT_SAMPLES
    auto: Any
    task: str

    def __init__(self, options: Options, data_dir: str) -> None:
        self.folder = base_folder(data_dir)
        self._digest = check_base(self.folder, str(options["base_digest"]))
        self._options = options
        self.names = [name.strip() for name in str(options["labels"]).split(",")]
        if len({*self.names, ""}) != len(self.names) + 1 or len(self.names) < 2:
            raise DatasetError("options.labels needs two names or more, with commas between them")
        self.config = load_config(
            self.folder,
            num_labels=len(self.names),
            id2label=dict(enumerate(self.names)),
            label2id={name: number for number, name in enumerate(self.names)},
        )

    def model(self) -> nn.Module:
        """The base with its adapter and head as they are first."""
        dtype = str(self._options["base_dtype"])
        base = load_base(self.auto, self.folder, self.config, dtype=dtype, head=_HEADS)
        head = tuple(name for name in _HEADS if hasattr(base.model, name))
        return AdaptedModule(base, AdapterPlan.of(self._options, self.task, head), self._digest)

    def logits(self, model: nn.Module, *inputs: Tensor) -> Tensor:
        """``float[b, classes]`` of a batch's fields but the last, its targets."""
        raise NotImplementedError

    def loss(self, model: nn.Module, *fields: Tensor) -> Tensor:
        """See `TorchWorkload`."""
        return F.cross_entropy(self.logits(model, *fields[:-1]).float(), fields[-1])

    def evaluate(self, model: nn.Module, *fields: Tensor) -> Sums:
        """See `TorchWorkload`."""
        logits, targets = self.logits(model, *fields[:-1]).float(), fields[-1]
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return Sums(float(loss), float((logits.argmax(dim=1) == targets).sum()), len(targets))


class TextClassifier(_Classifier):
    """Texts with a label each. Implements `TorchWorkload`."""

    auto = AutoModelForSequenceClassification
    task = "SEQ_CLS"
    pipeline = "text-classification"

    def __init__(self, options: Options, data_dir: str) -> None:
        super().__init__(options, data_dir)
        self._length = int(options["sequence_length"])
        self.evaluation_batch = max(1, _TOKENS_AT_ONCE // self._length)
        self._tokenizer = load_tokenizer(self.folder)
        if self.config.pad_token_id is None:
            self.config.pad_token_id = self._tokenizer.pad_token_id or 0

    def load(self, data_dir: str) -> Dataset:
        """Rows with ``text`` and ``label``: a class's name or number."""
        train, held_out = read_rows(Path(data_dir))
        return Dataset(self._samples(train), self._samples(held_out), tuple(self.names))

    def held_out(self, data_dir: str) -> Dataset:
        """See `NodeDataWorkload`."""
        samples = self._samples(all_rows(Path(data_dir)))
        return Dataset(NO_SAMPLES, samples, tuple(self.names))

    def node_samples(self, data_dir: str, node_dir: str) -> "LabelledTexts":
        """See `NodeDataWorkload`."""
        return self._samples(all_rows(Path(node_dir)))

    def logits(self, model: nn.Module, *inputs: Tensor) -> Tensor:
        """See `_Classifier`."""
        tokens, counts = inputs
        found: Tensor = model(input_ids=tokens.long(), attention_mask=counts.long())
        return found

    def save_reader(self, folder: Path) -> None:
        """Save what makes tokens of text beside a model."""
        self._tokenizer.save_pretrained(folder)

    def _samples(self, rows: Sequence[DataRow]) -> "LabelledTexts":
        texts, targets = [], []
        for row in rows:
            text, label = row.values.get("text"), row.values.get("label")
            number = label if type(label) is int else self._number(label)
            if not isinstance(text, str) or not 0 <= number < len(self.names):
                raise DatasetError(
                    f"{row.place}: a row has text, and a label that is one of"
                    f" {', '.join(self.names)} or its number. Fix: set options.labels"
                )
            found = self._tokenizer(text, truncation=True, max_length=self._length)
            texts.append(np.array(found["input_ids"], np.int32))
            targets.append(number)
        return LabelledTexts(texts, np.array(targets, np.int64), self.config.pad_token_id)

    def _number(self, label: Any) -> int:
        return self.names.index(label) if label in self.names else -1


class LabelledTexts(NamedTuple):
    """Texts as tokens. Implements `Samples`."""

    texts: Sequence[NDArray[np.int32]]
    labels: NDArray[np.int64]
    padding: int
    """The token that fills what is left."""

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, ...]:
        """Tokens ``int32[b, t]``, which of them are of the text, and class numbers."""
        chosen = [self.texts[index] for index in indices]
        length = max(1, *map(len, chosen))
        tokens = np.full((len(chosen), length), self.padding, np.int32)
        counts = np.zeros((len(chosen), length), np.uint8)
        for number, text in enumerate(chosen):
            tokens[number, : len(text)] = text
            counts[number, : len(text)] = 1
        return tokens, counts, self.labels[indices]


class _Preprocessor(msgspec.Struct, frozen=True):
    """The part of the base's file that says how pixels become its inputs."""

    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class ImageClassifier(_Classifier):
    """Images in a folder for each class. Implements `TorchWorkload`."""

    auto = AutoModelForImageClassification
    task = ""
    pipeline = "image-classification"
    evaluation_batch = _IMAGES_AT_ONCE

    def __init__(self, options: Options, data_dir: str) -> None:
        super().__init__(options, data_dir)
        path = self.folder / _PREPROCESSOR
        try:
            content = path.read_bytes() if path.exists() else b"{}"
            read = msgspec.json.decode(content, type=_Preprocessor)
        except (OSError, msgspec.DecodeError) as broken:
            raise DatasetError(f"{_PREPROCESSOR} cannot be read: {broken}") from broken
        self._mean, self._deviation = (
            torch.tensor(each).view(1, 3, 1, 1) for each in (read.image_mean, read.image_std)
        )

    def load(self, data_dir: str) -> Dataset:
        """Images below ``images/``, in sub-folders with the classes' names."""
        found = read_folder(
            str(Path(data_dir) / IMAGES_FOLDER), classes=len(self.names), image_size=self._side
        )
        return self._check_labels(found)

    def held_out(self, data_dir: str) -> Dataset:
        """See `NodeDataWorkload`."""
        found = held_out_folder(
            str(Path(data_dir) / IMAGES_FOLDER), classes=len(self.names), image_size=self._side
        )
        return self._check_labels(found)

    def node_samples(self, data_dir: str, node_dir: str) -> Pictures:
        """See `NodeDataWorkload`."""
        images = str(Path(data_dir) / IMAGES_FOLDER)
        return node_pictures(images, node_dir, image_size=self._side)

    @property
    def _side(self) -> int:
        side = getattr(self.config, "image_size", 224)
        return side if isinstance(side, int) else 224

    def _check_labels(self, found: Dataset) -> Dataset:
        if list(found.class_names) != self.names:
            raise DatasetError(
                f"the sub-folders are {', '.join(found.class_names)}."
                f' Fix: set options.labels = "{",".join(found.class_names)}"'
            )
        return found

    def logits(self, model: nn.Module, *inputs: Tensor) -> Tensor:
        """See `_Classifier`."""
        (images,) = inputs
        pixels = images.float() / 255 - self._mean.to(images.device)
        found: Tensor = model(pixel_values=pixels / self._deviation.to(images.device))
        return found

    def examples(self, inputs: Array, targets: Array) -> list[Example]:
        """Held-out images."""
        shown = zip(inputs.transpose(0, 2, 3, 1), targets, strict=True)
        return [Example(image=image, label=int(label)) for image, label in shown]

    def outputs(self, model: nn.Module, inputs: Tensor) -> list[int | str]:
        """Predicted classes."""
        return [*map(int, self.logits(model, inputs).argmax(dim=1))]

    def save_reader(self, folder: Path) -> None:
        """Save how images become inputs beside a model."""
        path = self.folder / _PREPROCESSOR
        if path.exists():
            (folder / _PREPROCESSOR).write_bytes(path.read_bytes())


class ClassifierBuilder(NamedTuple):
    """Builds the workload of each job. Implements `JobWorkload`."""

    kind: type[TextClassifier] | type[ImageClassifier]
    options: Options

    def for_job(self, data_dir: str) -> TextClassifier | ImageClassifier:
        """See `JobWorkload`."""
        return self.kind(self.options, data_dir)


def text_classifier(options: Options) -> ClassifierBuilder:
    """Builder of ``hf-text-classifier``."""
    return ClassifierBuilder(TextClassifier, options)


def image_classifier(options: Options) -> ClassifierBuilder:
    """Builder of ``hf-image-classifier``."""
    return ClassifierBuilder(ImageClassifier, options)
