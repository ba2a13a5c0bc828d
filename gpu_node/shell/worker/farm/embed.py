"""Kind ``map/embed``: a vector for each text or picture, by sentence-transformers.

The base's own files say how its tokens are pooled; a base of transformers without such files is
pooled by the mean of its tokens, as the library does. Texts beyond the model's length are cut, as
the library does. Pictures are read by the base's own processor, where it has one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from gpu_node.shell.worker.farm.base_folder import BaseSettings, KeptModel
from gpu_node.shell.worker.farm.bundle_output import BundleCourse, vector_output
from gpu_node.shell.worker.farm.chunk_items import TextItem, as_text, json_items
from gpu_node.shell.worker.farm.length_batches import length_batches
from gpu_node.shell.worker.farm.picture_samples import (
    decoded_picture,
    is_picture,
    picture_content,
)
from gpu_node.shell.worker.performers import WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.trainer import ShardCallbacks, ShardError
from hypergpu.farm.bundle_results import VectorResults
from hypergpu.farm.bundles import Bundle
from hypergpu.packed_work import unpack_work
from hypergpu.workloads.finetuning.base_model import first_sentence

_CHARACTERS_MOST = 65_536
"""Characters of a batch, padded: about 16,000 tokens of English."""
_ITEMS_MOST = 64
_PICTURES_MOST = 16
"""Pictures that are decoded at once: each may be of tens of megabytes."""
_Vectors = NDArray[np.float32]


class SentenceEmbedder:
    """A loaded model of sentence-transformers."""

    def __init__(self, folder: Path, parameters: Mapping[str, Any], device: torch.device) -> None:
        from sentence_transformers import SentenceTransformer

        dtype = getattr(torch, BaseSettings.of(parameters).dtype)
        try:
            self._model: Any = SentenceTransformer(
                str(folder),
                device=str(device),
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"use_safetensors": True, "dtype": dtype},
            )
        except Exception as error:  # a class may raise anything over its files
            raise ShardError(
                f"sentence-transformers cannot load the base: {first_sentence(error)}"
            ) from error
        self._prompt = parameters.get("prompt")
        self._is_normalized = bool(parameters.get("normalize", False))

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        return int(self._model.get_embedding_dimension())

    @property
    def device(self) -> str:
        """Kind of its device."""
        return str(self._model.device.type)

    @property
    def weights_bytes(self) -> int:
        """Memory that its weights take."""
        weights = [*self._model.parameters(), *self._model.buffers()]
        return sum(each.numel() * each.element_size() for each in weights)

    @property
    def tokens_most(self) -> int | None:
        """Tokens of a text at most: longer ones are cut; None: the model states no limit."""
        limit: int | None = self._model.max_seq_length
        return limit

    def token_count(self, text: str) -> int:
        """Tokens of a text, uncut."""
        return len(self._model.tokenizer(text, truncation=False)["input_ids"])

    @property
    def takes_pictures(self) -> bool:
        """Whether the base embeds pictures. The library's versions before 6 embed texts alone."""
        supports: Callable[[str], bool] | None = getattr(self._model, "supports", None)
        return supports is not None and supports("image")

    @property
    def takes_texts(self) -> bool:
        """Whether the base embeds texts."""
        supports: Callable[[str], bool] | None = getattr(self._model, "supports", None)
        return supports is None or supports("text")

    def embed(self, samples: Sequence[str | Image.Image]) -> _Vectors:
        """``float32[samples, dimension]`` of texts, or of pictures."""
        are_texts = isinstance(samples[0], str)
        values: _Vectors = self._model.encode(
            list(samples),
            batch_size=len(samples),
            prompt=self._prompt if are_texts else None,
            normalize_embeddings=self._is_normalized,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return values.astype(np.float32, copy=False)


def _batches(items: Sequence[TextItem]) -> Iterator[list[int]]:
    """Places of items that are embedded at once: texts of like length, or pictures, which all
    become equally large. Items that are neither are among the texts.
    """
    pictures = [place for place, item in enumerate(items) if is_picture(item)]
    texts = sorted({*range(len(items))} - {*pictures})
    lengths = [len(item.value) if isinstance(item.value, str) else 0 for item in items]
    for batch in length_batches(
        [lengths[place] for place in texts], tokens_most=_CHARACTERS_MOST, items_most=_ITEMS_MOST
    ):
        yield [texts[number] for number in batch]
    for first in range(0, len(pictures), _PICTURES_MOST):
        yield pictures[first : first + _PICTURES_MOST]


def _sample(model: SentenceEmbedder, item: TextItem) -> tuple[str | Image.Image | None, str]:
    """What the model takes of an item, or why it cannot be done."""
    if not is_picture(item):
        text = as_text(item)
        if not text.error and not model.takes_texts:
            return None, "the item is a text, and the base embeds pictures alone"
        return text.value, text.error
    if not model.takes_pictures:
        return None, "the item is a picture, and the base embeds texts alone"
    content, error = picture_content(item)
    return (None, error) if error else decoded_picture(content)


def embed_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What embeds the texts of bundles; it keeps its model from one to the next."""
    models = KeptModel(SentenceEmbedder)

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        course = BundleCourse(request, callbacks, bundle.items)
        items = json_items(request, bundle)
        course.advance(0)
        model = models.of(request, bundle)
        values = np.zeros((len(items), model.dimension), np.float32)
        errors: dict[int, str] = {}
        for places in _batches(items):
            samples: dict[int, str | Image.Image] = {}
            for place in places:
                sample, error = _sample(model, items[place])
                if sample is None:
                    errors[place] = error
                else:
                    samples[place] = sample
            if samples:
                values[[*samples]] = model.embed([*samples.values()])
            course.advance(len(places))
        for row in np.flatnonzero(~np.isfinite(values).all(axis=1)):
            errors.setdefault(int(row), "the vector holds values that are not finite numbers")
        return vector_output(
            request, course, VectorResults(values, errors), len(items) - len(errors)
        )

    return perform


perform = embed_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
