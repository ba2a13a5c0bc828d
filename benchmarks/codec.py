"""How fast one core encodes updates with error feedback, beside a plain copy in the same run.

The rate is float32 bytes of pseudo-gradient a second, from memory to memory: add the residual,
encode, and keep what was left unsaid.
"""

from benchmarks.ours.codec_rates import codec_rates
from benchmarks.ours.table import ResultTable
from hypergpu.jobfile.spec import CODECS
from hypergpu.tensors.codec import codec_named

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
