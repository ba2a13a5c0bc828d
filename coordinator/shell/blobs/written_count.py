"""How much of an upload counts whose file is as long as it will be from the beginning."""

import os
from contextlib import suppress
from pathlib import Path

GAUGE = ".gauge"
"""Ends the name of the small file beside the upload's."""
_BYTES = 8


class Gauge:
    """A number that survives the process. A power cut may put it ahead of the bytes that it counts:
    the upload's digest tells.
    """

    def __init__(self, upload: Path) -> None:
        """Begin at 0."""
        self._path = upload.with_name(upload.name + GAUGE)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)

    def write(self, committed_bytes: int) -> None:
        """Count up to here; the bytes are written already."""
        os.pwrite(self._descriptor, committed_bytes.to_bytes(_BYTES, "big"), 0)

    def remove(self) -> None:
        """From now on the whole file counts."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def cut_to_gauge(gauge: Path) -> None:
    """After a kill: cut the upload beside a gauge to what counts, and remove the gauge."""
    counted = gauge.read_bytes()
    committed_bytes = int.from_bytes(counted, "big") if len(counted) == _BYTES else 0
    upload = gauge.with_name(gauge.name.removesuffix(GAUGE))
    with suppress(FileNotFoundError):
        os.truncate(upload, min(committed_bytes, upload.stat().st_size))
    gauge.unlink()
