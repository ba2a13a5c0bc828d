"""How fast one core encodes updates with error feedback, beside a plain copy in the same run.

The rate is float32 bytes of pseudo-gradient a second, from memory to memory: add the residual,
encode, and keep what was left unsaid.
"""

import time
from collections.abc import Callable

import numpy as np

from benchmarks.ours.table import ResultTable
from hypergpu.jobfile.spec import CODECS
from hypergpu.tensors.codec import codec_named, encode_into_residual
from hypergpu.tensors.layout import Float32s
from hypergpu.tensors.records import Codec

MEBIBYTES = 64


def run(is_quick: bool) -> ResultTable:
    """Measure every codec."""
    mebibytes = 16 if is_quick else MEBIBYTES
    count = mebibytes << 18
    rates = codec_rates(count, repeats=3 if is_quick else 9)
    memcpy = rates["memcpy"]
    rows = [["memcpy", "32.00", f"{memcpy:.2f}", "1.00"]]
    for name in CODECS:
        bits = 8 * codec_named(name).encoded_bytes(count) / count
        rows.append([name, f"{bits:.2f}", f"{rates[name]:.2f}", f"{rates[name] / memcpy:.2f}"])
    return ResultTable(
        title=f"Encoding {mebibytes} MiB of float32 with error feedback on one core",
        columns=("codec", "bits a value", "encode, GB/s", "of memcpy"),
        rows=rows,
        metrics={
            "memcpy_gb_s": memcpy,
            **{f"{name}_gb_s": rates[name] for name in CODECS},
        },
        notes=(
            "Rates: float32 bytes per CPU second, best of the repeats; contenders take turns.",
            "Normal noise is encoded again and again; its residual goes on from repeat to repeat.",
        ),
    )


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
