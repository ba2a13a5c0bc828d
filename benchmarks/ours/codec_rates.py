"""How fast one core encodes updates with error feedback, and copies as many bytes."""

import time
from collections.abc import Callable

import numpy as np

from hypergpu.jobfile.spec import CODECS
from hypergpu.tensors.codec import codec_named, encode_into_residual
from hypergpu.tensors.layout import Float32s
from hypergpu.tensors.records import Codec


def codec_rates(count: int, *, repeats: int) -> dict[str, float]:
    """GB/s of each codec's encoding, and of a copy."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal(count, np.float32)
    residual = generator.standard_normal(count, np.float32) * np.float32(0.1)
    copy = np.zeros_like(values)
    contenders: dict[str, Callable[[], None]] = {"memcpy": lambda: np.copyto(copy, values)}
    for name in CODECS:
        contenders[name] = encoding(codec_named(name), values, residual.copy())
    best_s = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, work in contenders.items():
            start_s = time.thread_time()
            work()
            best_s[name] = min(best_s[name], time.thread_time() - start_s)
    return {name: 4 * count / seconds / 1e9 for name, seconds in best_s.items()}


def encoding(codec: Codec, values: Float32s, residual: Float32s) -> Callable[[], None]:
    """Encode again and again; the residual goes on from one repeat to the next, as on a node."""
    payload = np.zeros(codec.encoded_bytes(values.size), np.uint8)
    return lambda: encode_into_residual(codec, values, residual, payload)
