"""Kind ``map/embed``: a vector for each text, by sentence-transformers.

The base's own files say how its tokens are pooled; a base of transformers without such files is
pooled by the mean of its tokens, as the library does. Texts beyond the model's length are cut, as
the library does.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_node.shell.worker.farm.base_folder import BaseSettings, KeptModel
from gpu_node.shell.worker.farm.bundle_output import BundleCourse, vector_output
from gpu_node.shell.worker.farm.chunk_items import as_text, json_items
from gpu_node.shell.worker.farm.length_batches import length_batches
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

    def embed(self, texts: Sequence[str]) -> _Vectors:
        """``float32[texts, dimension]``."""
        values: _Vectors = self._model.encode(
            list(texts),
            batch_size=len(texts),
            prompt=self._prompt,
            normalize_embeddings=self._is_normalized,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        return values.astype(np.float32, copy=False)


def embed_performer() -> Callable[[DoWork, ShardCallbacks], WorkOutput]:
    """What embeds the texts of bundles; it keeps its model from one to the next."""
    models = KeptModel(SentenceEmbedder)

    def perform(request: DoWork, callbacks: ShardCallbacks) -> WorkOutput:
        bundle = unpack_work(request.work, request.work.kind, Bundle)
        course = BundleCourse(request, callbacks, bundle.items)
        items = [as_text(item) for item in json_items(request, bundle)]
        course.advance(0)
        model = models.of(request, bundle)
        values = np.zeros((len(items), model.dimension), np.float32)
        errors = {place: item.error for place, item in enumerate(items) if item.error}
        places = [place for place in range(len(items)) if place not in errors]
        lengths = [len(items[place].value) for place in places]
        for batch in length_batches(lengths, tokens_most=_CHARACTERS_MOST, items_most=_ITEMS_MOST):
            batch_places = [places[number] for number in batch]
            values[batch_places] = model.embed([items[place].value for place in batch_places])
            course.advance(len(batch))
        for place in np.flatnonzero(~np.isfinite(values).all(axis=1)):
            errors.setdefault(int(place), "the vector holds values that are not finite numbers")
        return vector_output(
            request, course, VectorResults(values, errors), len(items) - len(errors)
        )

    return perform


perform = embed_performer()
"""See `gpu_node.shell.worker.performers.Perform`. Its model is kept as long as the process."""
