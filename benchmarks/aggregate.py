"""How fast one core folds updates, beside a plain copy, and that memory ignores their number.

The rate is decoded float32 bytes a second through decode, weigh and add, from memory to memory.
Memory is the peak of a process that folds files as the coordinator does, above its idle size.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil

from benchmarks.ours.table import ResultTable
from coordinator.shell.aggregation.arithmetic import UpdateWeight, WeightedMean
from coordinator.shell.aggregation.fold import SPAN, fold
from coordinator.shell.aggregation.fold_request import FoldRequest, StoredBlob, StoredUpdate
from hypergpu.digests import digest_of_file
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.codec import codec_named, encode_update
from hypergpu.tensors.layout import Flat, Float32s, Layout, TensorSpec, layout_of

UPDATE_COUNTS = (2, 32)
WEIGHT = UpdateWeight(np.float32(0.5), np.float32(0.5))


def run(is_quick: bool) -> ResultTable:
    """Measure rates and peaks."""
    parameters = 4_000_000 if is_quick else 25_000_000
    rates = fold_rates(parameters, repeats=3 if is_quick else 9)
    peaks = {count: fold_peak_bytes(parameters, count) for count in UPDATE_COUNTS}
    model_bytes = 4 * parameters
    rows = [
        [f"{name}, GB/s", f"{rate:.2f}", f"{rate / rates['memcpy']:.2f} of memcpy"]
        for name, rate in rates.items()
    ]
    rows += [
        [f"peak, {count} updates, MB", f"{peak / 1e6:.1f}", f"{peak / model_bytes:.2f} models"]
        for count, peak in peaks.items()
    ]
    return ResultTable(
        title=f"Folding updates of {parameters / 1e6:.0f}M parameters",
        columns=("", "figure", "relative"),
        rows=rows,
        metrics={
            "fp32_over_memcpy": rates["fp32"] / rates["memcpy"],
            "peak_models_32": peaks[32] / model_bytes,
            "peak_growth_2_to_32": peaks[32] / peaks[2],
        },
        notes=(
            "Rates: decoded float32 bytes of one update per CPU second, best of the repeats.",
            "Peaks: above the idle process, the higher of fp32 and int4 both ways, files on disk.",
        ),
    )


def fold_rates(parameters: int, *, repeats: int) -> dict[str, float]:
    """GB/s of decoded update, and of a copy of the same bytes.

    The contenders take turns, so that a busy moment of the machine hits all of them alike.
    """
    values = np.random.default_rng(0).standard_normal(parameters, np.float32)
    copy = np.zeros_like(values)
    contenders: dict[str, Callable[[], None]] = {
        "memcpy": lambda: np.copyto(copy, values),
        "fp32": fold_in_memory("fp32", values),
    }
    best_s = dict.fromkeys(contenders, float("inf"))
    for _ in range(repeats):
        for name, work in contenders.items():
            start_s = time.thread_time()
            work()
            best_s[name] = min(best_s[name], time.thread_time() - start_s)
    updates = {name: 1 if name == "memcpy" else 2 for name in contenders}
    return {name: updates[name] * values.nbytes / 1e9 / best_s[name] for name in contenders}


def fold_in_memory(name: str, values: Float32s) -> Callable[[], None]:
    """Average two updates, span by span, as a fold does."""
    codec = codec_named(name)
    payloads = [np.empty(codec.encoded_bytes(values.size), np.uint8) for _ in range(2)]
    for payload in payloads:
        codec.encode(values, payload)
    mean = WeightedMean(SPAN)

    def average() -> None:
        for start in range(0, values.size, SPAN):
            count = min(SPAN, values.size - start)
            there = slice(codec.encoded_bytes(start), codec.encoded_bytes(start + count))
            mean.begin(count)
            for payload in payloads:
                mean.add(codec, payload[there], WEIGHT)

    return average


def fold_peak_bytes(parameters: int, updates: int) -> int:
    """The highest peak over the codecs, each in a process of its own."""
    return max(peak_bytes_of(codec, parameters, updates) for codec in ("fp32", "int4"))


def peak_bytes_of(codec: str, parameters: int, updates: int) -> int:
    """Prepare files and fold them in a new process."""
    layout = layout_of([TensorSpec("weight", (parameters,))])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, layout, codec)
        command = [sys.executable, "-m", "benchmarks.aggregate", name, codec, str(updates)]
        answer = subprocess.run(command, check=True, capture_output=True)
        return msgspec.json.decode(answer.stdout, type=int)


def write_inputs(folder: Path, layout: Layout, codec: str) -> None:
    """A base model and one update; every participant sends the same."""
    values = np.random.default_rng(0).standard_normal(layout.parameters_count, np.float32)
    update = Flat(values, np.empty(0, np.float32), np.empty(0, np.int64))
    (folder / "base").write_bytes(values.data)
    (folder / "update").write_bytes(encode_update(layout, codec, update).payload.data)
    (folder / "layout").write_bytes(layout.to_json())


def measured_fold(folder: Path, codec: str, updates: int) -> int:
    """Fold twice, the second time with outer state; gives the growth of this process's peak."""
    layout = msgspec.json.decode((folder / "layout").read_bytes(), type=Layout)
    update = stored_blob(folder / "update")
    request = FoldRequest(
        layout=layout,
        down=codec,
        outer=Outer(),
        base_model=stored_blob(folder / "base"),
        outer_state=None,
        updates=(StoredUpdate(update.path, update.digest, 32, codec),) * updates,
        output_dir=folder,
    )
    idle_bytes = psutil.Process().memory_info().rss
    first = fold(request)
    if first.outer_state is None:
        raise RuntimeError("a step with momentum leaves an outer state")
    state = StoredBlob(first.outer_state.path, first.outer_state.digest)
    base = StoredBlob(first.model.path, first.model.digest)
    fold(msgspec.structs.replace(request, base_model=base, outer_state=state))
    return peak_rss_bytes() - idle_bytes


def stored_blob(path: Path) -> StoredBlob:
    """Name a file's content, in flat memory."""
    return StoredBlob(path, digest_of_file(path))


def peak_rss_bytes() -> int:
    """This process's highest resident size so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kibibytes = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
    return 1024 * int(kibibytes)


if __name__ == "__main__":
    growth_bytes = measured_fold(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    sys.stdout.write(str(growth_bytes))
