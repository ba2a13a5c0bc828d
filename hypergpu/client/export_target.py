"""What may be written over: the files that an earlier export of the same job left, unchanged."""

import json
from pathlib import Path

from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason

JOB_FIELD = "hypergpu.job"
CARD_FIELD = "hypergpu.card"
"""BLAKE3 of the card that was written beside the model."""
HEADER_BYTES_MAX = 64 << 20


def check_replaceable(model: Path, card: Path, job_id: str) -> None:
    """Refuse to write over what is not ours.

    Raises:
        HyperGPUError: FILE_PRESENT, with the file and whose it is.
    """
    written = _written(model) if model.exists() else {}
    if model.exists() and written.get(JOB_FIELD) != job_id:
        whose = f"{written[JOB_FIELD]}'s model" if JOB_FIELD in written else "no export's"
        raise HyperGPUError(Reason.FILE_PRESENT, f"{model} is there already and is {whose}")
    if card.exists() and written.get(CARD_FIELD) != digest_of(card.read_bytes()):
        detail = f"{card} is there already and is not as an export of {job_id} left it"
        raise HyperGPUError(Reason.FILE_PRESENT, detail)


def _written(model: Path) -> dict[str, object]:
    """What an export noted in the file; empty for a file that none made."""
    try:
        with model.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, HEADER_BYTES_MAX)))
    except ValueError:
        return {}
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}
