"""A GGUF file as llama.cpp computes it. Its header was checked before llama.cpp opens it."""

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_node.shell.worker.chat_template.renderer import TemplateError, TemplateRenderer
from gpu_node.shell.worker.protocol import limits_from_environment
from gpu_node.shell.worker.serving.engine import EngineMemory, UnanswerableCallError
from gpu_node.shell.worker.serving.llama_library import LlamaLibrary, TokenBatch, llama_library
from gpu_node.shell.worker.serving.prefix_states import HeldPrefix
from gpu_node.shell.worker.trainer import ShardError
from hypergpu.gguf.header import GgufArray, GgufHeader, read_gguf_header
from hypergpu.units import Bytes

_BATCH_TOKENS = 512
_UBATCH_TOKENS = 256
"""Tokens of one pass: what a pass needs grows with them and with the vocabulary."""
_CONTEXT_STEP = 256
_SCORED_TOKENS = 64
"""Tokens of a pass that gives the logits of each: llama.cpp holds them all at once."""
_SEQUENCE = 0
"""Number of a reader's only text in its memory."""
_STATE_NUMBER_BYTES = 2
"""Keys and values are held as float16."""
_STEP_ERROR = 0.1
"""Numbers of files are rounded to a few bits, and those of a pass to eight."""


class GgufModel:
    """See `TokenModel`.

    Args:
        path: The file.

    Raises:
        HyperGPUError: FILE_UNUSABLE, its header is not right.
        ShardError: llama.cpp does not load it.
        MemoryError: There is too little for it.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        library = llama_library()
        library.take_faults()
        model = library.model_load_from_file(str(path).encode(), library.model_default_params())
        if not model:
            raise _load_failure(library.take_faults())
        self._free = weakref.finalize(self, library.model_free, model)
        if library.model_has_encoder(model):
            raise ShardError("the file's model reads texts and writes none")
        self._library = library
        self._model = model
        self._vocabulary = library.model_get_vocab(model)
        self._header = header
        self._renderer = TemplateRenderer()
        self.device = "cuda" if library.supports_gpu_offload() else "cpu"
        self.vocabulary = int(library.vocab_n_tokens(self._vocabulary))
        if not self.vocabulary:
            raise ShardError("the file has no vocabulary")
        self.tokens_most: int | None = int(library.model_n_ctx_train(model)) or None
        self.end_tokens = frozenset(
            token
            for token in range(self.vocabulary)
            if library.vocab_is_eog(self._vocabulary, token)
        )
        self.step_error_most = _STEP_ERROR
        self.rounds_by_piece = True
        weights_bytes = Bytes(library.model_size(model))
        self.memory = EngineMemory(weights_bytes, token_state_bytes(header))

    def encode(self, text: str) -> list[int]:
        """See `TokenModel.encode`."""
        return self._tokens(text, begins=True)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """See `TokenModel.encode_chat`."""
        names = ("tokenizer.chat_template.tool_use",) if tools else ()
        templates = map(self._header.text, (*names, "tokenizer.chat_template"))
        template = next(filter(None, templates), None)
        try:
            text = self._renderer.chat_text(template, messages, tools, self._marks())
        except TemplateError as error:
            raise UnanswerableCallError(str(error)) from error
        return self._tokens(text, begins=False)

    def _marks(self) -> dict[str, str]:
        """Texts of the tokens by which texts begin and end."""
        library, vocabulary = self._library, self._vocabulary
        tokens = {
            "bos_token": library.vocab_bos(vocabulary),
            "eos_token": library.vocab_eos(vocabulary),
        }
        return {
            name: library.vocab_get_text(vocabulary, token).decode("utf-8", "replace")
            for name, token in tokens.items()
            if token >= 0
        }

    def _tokens(self, text: str, *, begins: bool) -> list[int]:
        content = text.encode()
        room = len(content) + 8
        for _ in range(2):
            tokens = (ctypes.c_int32 * room)()
            count = self._library.tokenize(
                self._vocabulary, content, len(content), tokens, room, begins, True
            )
            if count >= 0:
                return list(tokens[:count])
            room = -count
        raise UnanswerableCallError("the prompt cannot be read as tokens")

    def decode(self, tokens: Sequence[int]) -> str:
        """See `TokenModel.decode`."""
        numbers = (ctypes.c_int32 * len(tokens))(*tokens)
        room = 16 * len(tokens) + 16
        for _ in range(2):
            content = ctypes.create_string_buffer(room)
            size = self._library.detokenize(
                self._vocabulary, numbers, len(tokens), content, room, False, False
            )
            if size >= 0:
                return content.raw[:size].decode("utf-8", "replace")
            room = -size
        return ""

    def open_reader(self, tokens_most: int) -> "GgufReader":
        """See `TokenModel.open_reader`: memory for all of its tokens is taken at once."""
        return GgufReader(self, self._library, self._model, tokens_most)

    def resume_reader(self, tokens_most: int, prefix: HeldPrefix) -> "GgufReader | None":
        """See `KeepingModel.resume_reader`."""
        state = prefix.state
        reader = self.open_reader(max(tokens_most, prefix.tokens))
        if isinstance(state, GgufState) and reader.restore(state, prefix.tokens):
            return reader
        reader.close()
        return None


class GgufState:
    """See `PrefixState`: llama.cpp's own form of a text's keys and values.

    Args:
        content: The bytes, which nobody changes.
        tokens: Tokens of the text.
    """

    def __init__(self, content: Any, tokens: int) -> None:
        self.content = content
        self.tokens = tokens

    @property
    def size_bytes(self) -> int:
        """See `PrefixState.size_bytes`."""
        return len(self.content)

    def part(self, tokens: int) -> "GgufState":
        """See `PrefixState.part`: a reader copies what it takes, so that no copy is needed here."""
        return self


class GgufReader:
    """See `TokenReader`."""

    def __init__(
        self, owner: GgufModel, library: LlamaLibrary, model: int, tokens_most: int
    ) -> None:
        self._owner = owner
        """Keeps the model while its state is there."""
        self._library = library
        parameters = library.context_default_params()
        parameters.n_ctx = -(-tokens_most // _CONTEXT_STEP) * _CONTEXT_STEP
        parameters.n_batch, parameters.n_ubatch = _BATCH_TOKENS, _UBATCH_TOKENS
        context = library.init_from_model(model, parameters)
        if not context:
            raise MemoryError(library.take_faults())
        self._context = context
        self._free = weakref.finalize(self, library.free, context)
        self._tokens = 0
        self._batch_tokens = min(_BATCH_TOKENS, parameters.n_ctx)
        sizes = (library.n_ctx(context), library.n_batch(context))
        if sizes != (parameters.n_ctx, self._batch_tokens):
            raise ShardError(f"llama.cpp made a state of {sizes} tokens and not the one asked for")
        threads = limits_from_environment().threads
        library.set_n_threads(context, threads, threads)

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `TokenReader.read`."""
        for begin in range(0, len(tokens), self._batch_tokens):
            piece = tokens[begin : begin + self._batch_tokens]
            self._decode(piece)
        return self._logits(-1)

    def read_each(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `ScoringReader.read_each`."""
        rows = torch.empty(len(tokens), self._owner.vocabulary)
        for begin in range(0, len(tokens), _SCORED_TOKENS):
            piece = tokens[begin : begin + _SCORED_TOKENS]
            self._decode(piece, wants_each=True)
            for place in range(len(piece)):
                rows[begin + place] = self._logits(place)
        return rows

    def _decode(self, piece: Sequence[int], *, wants_each: bool = False) -> None:
        self._tokens += len(piece)
        numbers = (ctypes.c_int32 * len(piece))(*piece)
        batch = TokenBatch(n_tokens=len(piece), token=numbers)
        if wants_each:
            wanted_rows = (ctypes.c_int8 * len(piece))(*(1 for _ in piece))
            batch.logits = ctypes.cast(wanted_rows, ctypes.c_void_p)
        if status := self._library.decode(self._context, batch):
            detail = f"llama.cpp computes no more ({status}): {self._library.take_faults()}"
            raise MemoryError(detail) if status > 0 else UnanswerableCallError(detail)

    def _logits(self, place: int) -> torch.Tensor:
        """Logits after a token of the last piece, valid until the next one."""
        logits = self._library.get_logits_ith(self._context, place)
        if not logits:
            raise UnanswerableCallError("llama.cpp gives no logits of this token")
        return torch.from_numpy(np.ctypeslib.as_array(logits, (self._owner.vocabulary,)))

    def take_state(self) -> GgufState | None:
        """See `KeepingReader.take_state`."""
        size = self._library.state_seq_get_size(self._context, _SEQUENCE)
        if not size:
            return None
        content = ctypes.create_string_buffer(size)
        written_bytes = self._library.state_seq_get_data(self._context, content, size, _SEQUENCE)
        return GgufState(content, self._tokens) if written_bytes == size else None

    def restore(self, state: GgufState, tokens: int) -> bool:
        """Go on from the first tokens of a state; False: it cannot be cut there.

        Only for a reader that has read nothing, and has room for these tokens.
        """
        library, size = self._library, len(state.content)
        if state.tokens > library.n_ctx(self._context):
            return False
        if library.state_seq_set_data(self._context, state.content, size, _SEQUENCE) != size:
            return False
        memory = library.get_memory(self._context)
        if not library.memory_seq_rm(memory, _SEQUENCE, tokens, -1):
            return False
        self._tokens = tokens
        return True

    def close(self) -> None:
        """See `TokenReader.close`."""
        self._free()


def token_state_bytes(header: GgufHeader) -> Bytes:
    """State that a conversation keeps for each token: keys and values of every layer."""
    kind = header.architecture
    layers = header.number(f"{kind}.block_count") or 0
    heads = header.number(f"{kind}.attention.head_count") or 1
    width = (header.number(f"{kind}.embedding_length") or 0) // heads
    lengths = [
        header.number(f"{kind}.attention.{name}_length") or width for name in ("key", "value")
    ]
    state_heads = header.metadata.get(f"{kind}.attention.head_count_kv", heads)
    if isinstance(state_heads, GgufArray):
        layer_heads = sum(int(each) for each in state_heads.numbers)
    else:
        layer_heads = layers * state_heads if isinstance(state_heads, int) else layers * heads
    return Bytes(layer_heads * sum(lengths) * _STATE_NUMBER_BYTES)


def _load_failure(faults: str) -> Exception:
    if "alloc" in faults or "out of memory" in faults:
        return MemoryError(faults)
    return ShardError(f"llama.cpp does not load the file: {faults or 'it does not say why'}")
