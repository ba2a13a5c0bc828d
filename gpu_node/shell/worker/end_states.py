"""End states of rounds on disk, kept for two rounds: one assigned again starts as it did before."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from hypergpu.durable import fill_durably
from hypergpu.ids import Digest
from hypergpu.tensors.layout import Flat, Float32s, Octets

_GENERATIONS = 2


class EndState(NamedTuple):
    """State that the next round starts from."""

    residual: Float32s
    """The part of the pseudo-gradient that compression left out."""
    update: Octets
    codec: str
    """Codec of the update; the next round may use another."""
    optimizer: dict[str, NDArray[np.float32]]
    model: Flat | None = None
    """The trained model, where a prefetch may start from it."""


class EndStateError(Exception):
    """The end state of a round is missing, damaged or of another model."""


def _path(folder: Path, round: int) -> Path:
    return folder / f"end-{round}.safetensors"


def save_end_state(folder: Path, round: int, state: EndState, layout: Digest) -> None:
    """Make the end state durable and delete all but the two newest up to ``round``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, NDArray[np.generic]] = {"residual": state.residual, "update": state.update}
    tensors.update((f"optimizer/{name}", array) for name, array in state.optimizer.items())
    if state.model is not None:
        tensors["model/parameters"] = state.model.parameters
        tensors["model/statistics"] = state.model.statistics
        tensors["model/integers"] = state.model.integers
    metadata = {"layout": layout, "codec": state.codec}
    fill_durably(_path(folder, round), lambda partial: save_file(tensors, partial, metadata))
    states_by_round = {
        int(path.stem.removeprefix("end-")): path for path in folder.glob("end-*.safetensors")
    }
    kept_rounds = sorted(number for number in states_by_round if number <= round)[-_GENERATIONS:]
    for number, path in states_by_round.items():
        if number not in kept_rounds:
            path.unlink(missing_ok=True)


def load_end_state(folder: Path, round: int, layout: Digest) -> EndState:
    """Read the end state of a round.

    Raises:
        EndStateError: It cannot be used.
    """
    path = _path(folder, round)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise EndStateError(f"{path} cannot be read: {error}") from error
    if metadata.get("layout") != layout:
        raise EndStateError(f"{path} is of another model")
    optimizer = {
        name.removeprefix("optimizer/"): array
        for name, array in tensors.items()
        if name.startswith("optimizer/")
    }
    model = None
    if "model/parameters" in tensors:
        kinds = (tensors[f"model/{name}"] for name in Flat._fields)
        model = Flat(*kinds)
    return EndState(tensors["residual"], tensors["update"], metadata["codec"], optimizer, model)
