"""Layers of a model that a node has as files, to hold or to read one after another."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from gpu_node.shell.worker.farm.folder_files import index_content, lay_out_folder
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.transformers_model import TransformersText
from hypergpu.farm.base_files import BASE_INDEX, read_base_index
from hypergpu.farm.bundles import Bundle
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import StageWork, span_blobs
from hypergpu.workloads.finetuning.base_model import (
    check_settings,
    check_task,
    load_config,
    load_tokenizer,
)
from hypergpu.workloads.slices.layer_blobs import load_blobs
from hypergpu.workloads.slices.layer_slice import LayerSlice, SliceError


class StageLayers:
    """Layers whose files a node's work names.

    Args:
        request: Where its files are.
        work: Names them.
        device: Where layers are computed.
    """

    def __init__(self, request: DoWork, work: StageWork, device: torch.device) -> None:
        self._request, self._work, self._device = request, work, device

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """The model's settings and tokenizer as a folder.

        Raises:
            ShardError: The work lacks files.
            DatasetError: Its settings are none that may be loaded.
            HyperGPUError: MANIFEST_INVALID, its index is not right.
        """
        bundle = Bundle(start=0, items=0, files=self._work.files, parameters={})
        with tempfile.TemporaryDirectory(prefix="stage-") as scratch:
            folder = Path(scratch)
            content = index_content(self._request, bundle, BASE_INDEX, "model")
            lay_out_folder(self._request, bundle, read_base_index(content), folder)
            for path in sorted(folder.rglob("*.json")):
                check_settings(path)
            yield folder

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The whole model's; raises as `_folder`."""
        with self._folder() as folder:
            config: PreTrainedConfig = load_config(folder)
        check_task(AutoModelForCausalLM, config, "write text")
        return config

    def load(self, span: LayerSpan) -> LayerSlice:
        """Some layers in memory.

        Raises:
            SliceError: Their files are absent, or are not those of the model.
        """
        layer_slice = LayerSlice(self.config, span)
        names = span_blobs(span, self._work.cut.layers)
        paths = {name: self._input_path(name) for name in names}
        load_blobs(layer_slice, paths, getattr(torch, self._work.dtype), self._device)
        return layer_slice

    def _input_path(self, name: str) -> Path:
        if name not in self._work.files:
            raise SliceError(f"the work names no file {name}")
        return self._request.input_path(self._work.files[name])

    def slices(self, span: LayerSpan) -> Iterator[LayerSlice]:
        """See `LayerSource.slices`: each is freed before the next one is read."""
        for layer in range(span.first, span.end):
            yield self.load(LayerSpan(layer, layer + 1))

    def text(self) -> TransformersText:
        """The model's tokens; raises as `_folder`."""
        with self._folder() as folder:
            tokenizer: Any = load_tokenizer(folder)
            if (folder / "generation_config.json").is_file():
                generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
            else:
                generation = GenerationConfig.from_model_config(self.config)
        ends = generation.eos_token_id
        every = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
        end_tokens = {int(each) for each in every if each is not None}
        return TransformersText(tokenizer, end_tokens, self.config.get_text_config().vocab_size)
