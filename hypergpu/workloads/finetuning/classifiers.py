"""The workloads ``hf-text-classifier`` and ``hf-image-classifier``: an adapter, and a head that is
trained as a whole.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from hypergpu.workloads.datasets import NO_SAMPLES, Array, Dataset, DatasetError
from hypergpu.workloads.entry import Options
from hypergpu.workloads.evaluation import Sums
from hypergpu.workloads.examples import Example
from hypergpu.workloads.finetuning.adapters import AdaptedModule, AdapterPlan
from hypergpu.workloads.finetuning.base_model import (
    base_folder,
    check_base,
    check_length,
    check_task,
    empty_model,
    head_names,
    load_base,
    load_config,
    load_tokenizer,
    positions_most,
    trained_head,
)
from hypergpu.workloads.finetuning.labels import check_numbers, class_number
from hypergpu.workloads.finetuning.packing import trial_tokens
from hypergpu.workloads.finetuning.pixels import pixel_rules
from hypergpu.workloads.finetuning.row_files import RowFiles
from hypergpu.workloads.finetuning.rows import DataRow, all_rows, read_rows
from hypergpu.workloads.finetuning.tokens import check_tokens
from hypergpu.workloads.networks.image_folder import (
    Pictures,
    held_out_folder,
    node_pictures,
    read_folder,
)
from hypergpu.workloads.networks.images import drawn_images
from hypergpu.workloads.splits import HELD_OUT

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
    purpose: str
    """What the model does, for messages."""

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
        check_task(self.auto, self.config, self.purpose)
        self._notes: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """See `NotedWorkload`."""
        return tuple(dict.fromkeys(self._notes))

    def model(self) -> nn.Module:
        """The base with its adapter and head as they are first."""
        dtype = str(self._options["base_dtype"])
        head = head_names(empty_model(self.auto, self.config))
        base = load_base(self.auto, self.folder, self.config, dtype=dtype, head=head)
        plan = AdapterPlan.of(self._options, self.task, trained_head(base))
        return AdaptedModule(base, plan, self._digest)

    def logits(self, model: nn.Module, *inputs: Tensor) -> Tensor:
        """``float[b, classes]`` of a batch's fields but the last, its targets."""
        raise NotImplementedError

    def trial_logits(self, run: Callable[..., Tensor]) -> Tensor:
        """Logits of an input that is no sample, by which a merged model is compared with its
        adapter.

        Args:
            run: A model that gives logits for its named inputs.
        """
        with torch.inference_mode():
            return run(**self.trial_inputs()).float()

    def trial_inputs(self) -> dict[str, Tensor]:
        """Inputs of the model by name, the same each time."""
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
    purpose = "judge texts"
    pipeline = "text-classification"

    def __init__(self, options: Options, data_dir: str) -> None:
        super().__init__(options, data_dir)
        self._length = int(options["sequence_length"])
        self.evaluation_batch = max(1, _TOKENS_AT_ONCE // self._length)
        check_length(self._length, positions_most(self.auto, self.config))
        self._tokenizer = load_tokenizer(self.folder)
        self._vocabulary = getattr(self.config.get_text_config(), "vocab_size", None) or 0
        self._pad()

    def _pad(self) -> None:
        """Have base and tokenizer agree on the token that fills what is left.

        Models that write text have none of their own; they judge the last token that is not it.
        """
        tokenizer, config = self._tokenizer, self.config.get_text_config()
        padding = config.pad_token_id
        if padding is None:
            padding = tokenizer.pad_token_id
        if padding is None:
            padding = tokenizer.eos_token_id
        if padding is None:
            raise DatasetError(
                "the base's tokenizer has no token that fills what is left of a batch. Fix: set"
                " tokenizer.pad_token and save it with tokenizer.save_pretrained(folder)"
            )
        self.config.pad_token_id = config.pad_token_id = self._padding = int(padding)
        if tokenizer.pad_token_id != padding:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(self._padding)

    def load(self, data_dir: str) -> Dataset:
        """Rows with ``text`` and ``label``: a class's name or number."""
        train, held_out, files = read_rows(Path(data_dir))
        self._note_files(files)
        check_numbers([*train, *held_out], self.names)
        return Dataset(self._samples(train), self._samples(held_out), tuple(self.names))

    def check(self, data_dir: str, *, has_train: bool) -> None:
        """See `CheckedWorkload`: every row becomes tokens, and no weight is read."""
        self.load(data_dir) if has_train else self.held_out(data_dir)

    def held_out(self, data_dir: str) -> Dataset:
        """See `NodeDataWorkload`."""
        rows, files = all_rows(Path(data_dir), HELD_OUT)
        self._note_files(files)
        return Dataset(NO_SAMPLES, self._samples(rows), tuple(self.names))

    def node_samples(self, data_dir: str, node_dir: str) -> "LabelledTexts":
        """See `NodeDataWorkload`."""
        return self._samples(all_rows(Path(node_dir)).rows)

    def _note_files(self, files: RowFiles) -> None:
        self._notes.append(files.summary)

    def logits(self, model: nn.Module, *inputs: Tensor) -> Tensor:
        """See `_Classifier`."""
        tokens, counts = inputs
        logits: Tensor = model(input_ids=tokens.long(), attention_mask=counts.long())
        return logits

    def trial_inputs(self) -> dict[str, Tensor]:
        """See `_Classifier`."""
        return {"input_ids": trial_tokens(self._vocabulary or 2, self._length)}

    def save_reader(self, folder: Path) -> None:
        """Save what makes tokens of text beside a model."""
        self._tokenizer.save_pretrained(folder)

    def _samples(self, rows: Sequence[DataRow]) -> "LabelledTexts":
        texts, targets = [], []
        for row in rows:
            text = row.values.get("text")
            if not isinstance(text, str):
                raise DatasetError(f"{row.place} has no text. Fix: give each row the field text")
            targets.append(class_number(row.place, row.values.get("label"), self.names))
            encoding = self._tokenizer(text, truncation=True, max_length=self._length)
            tokens = np.array(encoding["input_ids"], np.int32)
            is_text = bool(text.strip())
            check_tokens(row.place, tokens, self._tokenizer, self._vocabulary, is_text=is_text)
            texts.append(tokens)
        return LabelledTexts(texts, np.array(targets, np.int64), self._padding)


class LabelledTexts(NamedTuple):
    """Texts as tokens. Implements `SampleSource`."""

    texts: Sequence[NDArray[np.int32]]
    labels: NDArray[np.int64]
    padding: int
    """The token that fills what is left."""

    def batch(self, indices: NDArray[np.int64]) -> tuple[Array, ...]:
        """Tokens ``int32[b, t]``, which of them are of the text, and class numbers."""
        texts = [self.texts[index] for index in indices]
        length = max(1, *map(len, texts))
        tokens = np.full((len(texts), length), self.padding, np.int32)
        counts = np.zeros((len(texts), length), np.uint8)
        for number, text in enumerate(texts):
            tokens[number, : len(text)] = text
            counts[number, : len(text)] = 1
        return tokens, counts, self.labels[indices]


class ImageClassifier(_Classifier):
    """Images in a folder for each class. Implements `TorchWorkload`."""

    auto = AutoModelForImageClassification
    task = ""
    purpose = "judge images"
    pipeline = "image-classification"
    evaluation_batch = _IMAGES_AT_ONCE

    def __init__(self, options: Options, data_dir: str) -> None:
        super().__init__(options, data_dir)
        self._pixels = pixel_rules(self.folder / _PREPROCESSOR, self.config)

    def load(self, data_dir: str) -> Dataset:
        """Images below ``images/``, in sub-folders with the classes' names, in any order."""
        return read_folder(self._images(data_dir), classes=self.names, form=self._pixels.form)

    def check(self, data_dir: str, *, has_train: bool) -> None:
        """See `CheckedWorkload`: a few images of each class are decoded."""
        dataset = self.load(data_dir) if has_train else self.held_out(data_dir)
        for samples in (dataset.train, dataset.test):
            if len(samples.labels):
                _, firsts = np.unique(samples.labels, return_index=True)
                samples.batch(firsts)

    def held_out(self, data_dir: str) -> Dataset:
        """See `NodeDataWorkload`."""
        return held_out_folder(self._images(data_dir), classes=self.names, form=self._pixels.form)

    def node_samples(self, data_dir: str, node_dir: str) -> Pictures:
        """See `NodeDataWorkload`."""
        return node_pictures(
            self._images(data_dir), node_dir, form=self._pixels.form, classes=self.names
        )

    def _images(self, data_dir: str) -> str:
        return str(Path(data_dir) / IMAGES_FOLDER)

    def logits(self, model: nn.Module, *inputs: Tensor) -> Tensor:
        """See `_Classifier`."""
        (images,) = inputs
        logits: Tensor = model(pixel_values=self._pixels.inputs(images))
        return logits

    def trial_inputs(self) -> dict[str, Tensor]:
        """See `_Classifier`."""
        form = self._pixels.form
        values = torch.arange(form.channels * form.height * form.width) * 37 % 256
        images = values.view(1, form.channels, form.height, form.width)
        return {"pixel_values": self._pixels.inputs(images)}

    def examples(self, inputs: Array, targets: Array) -> list[Example]:
        """Held-out images."""
        pairs = zip(drawn_images(inputs), targets, strict=True)
        return [Example(image=image, label=int(label)) for image, label in pairs]

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
