"""`python -m hypergpu.workloads.slices.adapter_export FOLDER METADATA` writes an adapter that a
ring trained as peft loads it onto the whole base: into ``FOLDER/adapter``, of the files that an
export fetched. The metadata, a table of texts as JSON, go into the file of its tensors.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_adapter import RingAdapter
from hypergpu.rings.stage_work import layer_blob
from hypergpu.workloads.datasets import DatasetError

RING_FILE = "ring.json"
"""What was trained, as `RingAdapter`, among the fetched files."""
SETTINGS_FOLDER, ADAPTER_FOLDER = "settings", "adapter"
WEIGHTS_NAME, CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
"""Files that peft loads."""


def write_adapter(folder: Path, metadata: dict[str, str]) -> None:
    """Write peft's files.

    Args:
        folder: Files of the layers by their names, the base's settings in `SETTINGS_FOLDER`, and
            `RING_FILE`.
        metadata: For the file of tensors.

    Raises:
        DatasetError: The base's settings are none that may be loaded.
        ValueError: The files are not those of such an adapter.
    """
    from hypergpu.workloads.finetuning.base_model import check_settings, load_config
    from hypergpu.workloads.finetuning.export import base_name
    from hypergpu.workloads.slices.layer_slice import LayerSlice, SliceError
    from hypergpu.workloads.slices.slice_adapter import SliceAdapter

    ring_adapter = msgspec.json.decode((folder / RING_FILE).read_bytes(), type=RingAdapter)
    base = folder / SETTINGS_FOLDER
    for path in sorted(base.rglob("*.json")):
        check_settings(path)
    try:
        layer_slice = LayerSlice(load_config(base), LayerSpan(0, ring_adapter.layers))
        adapter = SliceAdapter(layer_slice, ring_adapter.training)
    except SliceError as error:
        raise DatasetError(str(error)) from error
    values = {each.name: adapter.first_value(each) for each in adapter.frozen}
    for layer, tensors in adapter.layers.items():
        shapes = {each.name: tuple(each.parameter.shape) for each in tensors}
        values |= _layer_values(folder / layer_blob(layer), shapes)
    out = folder / ADAPTER_FOLDER
    out.mkdir(exist_ok=True)
    adapter.config.base_model_name_or_path = base_name(base)
    adapter.config.inference_mode = True
    adapter.config.save_pretrained(out)
    # As peft names them in its files.
    tensors_by_name = {name.replace(".default.", "."): each for name, each in values.items()}
    save_file(tensors_by_name, out / WEIGHTS_NAME, {"format": "pt", **metadata})


def _layer_values(
    path: Path, shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Trained tensors of a layer: its file begins with them; the optimizer's state follows."""
    content = np.frombuffer(path.read_bytes(), "<f4")
    count = sum(int(np.prod(shape)) for shape in shapes.values())
    if len(content) != 3 * count + 1:
        raise ValueError(f"{path.name} has {len(content)} numbers, not {3 * count + 1}")
    first = 0
    for name, shape in shapes.items():
        end = first + int(np.prod(shape))
        yield name, content[first:end].reshape(shape).astype(np.float32)
        first = end


def main(arguments: list[str]) -> int:
    """Write the files; gives the process's exit status."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
    if len(arguments) != 2:
        sys.stderr.write(
            "usage: python -m hypergpu.workloads.slices.adapter_export FOLDER METADATA\n"
        )
        return 2
    try:
        metadata = msgspec.json.decode(arguments[1], type=dict[str, str])
        write_adapter(Path(arguments[0]), metadata)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error.name} is missing. Fix: pip install 'hypergpu[hf]'\n")
        return 1
    except (DatasetError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
