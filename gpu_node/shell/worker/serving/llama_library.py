"""llama.cpp's own functions, as the package xllamacpp brings them (`llama.h`).

The package's Python interface is a whole server, which opens a port and draws by rules of its own;
draws of ours follow from seed and position. So the functions beneath are called. Of structures
whose fields differ between versions only the first four are written, whose usual values are
compared first, and what came of them is asked for afterwards.
"""

import ctypes
from collections import deque
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_node.shell.worker.trainer import ShardError

PACKAGE = "xllamacpp"
_USUAL_CONTEXT = (512, 2_048, 512, 1)
"""Usual values of a context's first four fields."""
_STRUCTURE_BYTES = 1_024
"""More than any version's structures have: they are passed in memory, and read from the begin."""
_FAULT_LEVELS = frozenset({3, 4})
_FAULT_LINES = 6


class ModelParameters(ctypes.Structure):
    """``llama_model_params``: only the usual ones are used."""

    _fields_ = (("content", c_int8 * _STRUCTURE_BYTES),)


class ContextParameters(ctypes.Structure):
    """``llama_context_params``."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("rest", c_int8 * (_STRUCTURE_BYTES - 16)),
    )


class TokenBatch(ctypes.Structure):
    """``llama_batch``: places follow the last ones, and only the last token gives logits."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


_LOG_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_LOG_CALLBACK, c_void_p)),
    "llama_supports_gpu_offload": (c_bool, ()),
    "llama_model_default_params": (ModelParameters, ()),
    "llama_context_default_params": (ContextParameters, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelParameters)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_size": (c_uint64, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_vocab_bos": (c_int32, (c_void_p,)),
    "llama_vocab_eos": (c_int32, (c_void_p,)),
    "llama_vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "llama_tokenize": (
        c_int32,
        (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
    ),
    "llama_detokenize": (
        c_int32,
        (c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool),
    ),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextParameters)),
    "llama_free": (None, (c_void_p,)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_decode": (c_int32, (c_void_p, TokenBatch)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
}


class LlamaLibrary:
    """The functions, with their types; nothing of a log but its newest faults is kept.

    Raises:
        ShardError: The package is not there, or of a version that has other functions.
    """

    def __init__(self, path: Path) -> None:
        functions = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(functions, name, None)
            if function is None:
                raise _unknown_version(f"it has no {name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("llama_"), function)
        usual = self.context_default_params()
        fields = (usual.n_ctx, usual.n_batch, usual.n_ubatch, usual.n_seq_max)
        if fields != _USUAL_CONTEXT:
            raise _unknown_version(f"a context begins with {fields} and not {_USUAL_CONTEXT}")
        self._faults: deque[str] = deque(maxlen=_FAULT_LINES)
        self._log_callback = _LOG_CALLBACK(self._note_line)
        self.log_set(self._log_callback, None)
        self.backend_init()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _note_line(self, level: int, line: bytes, _: object) -> None:
        if level in _FAULT_LEVELS and line:
            self._faults.append(line.decode("utf-8", "replace").strip()[:200])

    def take_faults(self) -> str:
        """What was complained of since the last time, for people."""
        text = "; ".join(self._faults)
        self._faults.clear()
        return text


@cache
def llama_library() -> LlamaLibrary:
    """llama.cpp of this process.

    Raises:
        ShardError: It cannot be used.
    """
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    paths = [path for folder in folders for path in Path(folder).glob(f"{PACKAGE}*.so")]
    if len(paths) != 1:
        raise ShardError(f"there is no {PACKAGE} here. Fix: pip install 'hypergpu[gguf]'")
    try:
        return LlamaLibrary(paths[0])
    except OSError as error:
        raise _unknown_version(str(error)[:200]) from error


def _unknown_version(detail: str) -> ShardError:
    return ShardError(
        f"this {PACKAGE} is none that is known here: {detail}. Fix: pip install 'hypergpu[gguf]'"
    )
