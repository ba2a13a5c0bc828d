"""A recording in place of a coordinator: frames come at the pace at which they were recorded."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from dashboard_api.core.frames import PROTOCOL, HelloFrame
from dashboard_api.core.recording import RecordedFrame, RecordingError, decode_recording
from hypergpu.errors import HyperGPUError, Reason

GAP_MOST_MS = 2_000
"""A longer silence is cut to this."""


class Recording:
    """Frames of a file."""

    def __init__(self, frames: list[RecordedFrame]) -> None:
        self._frames = frames

    @classmethod
    def read(cls, path: Path) -> "Recording":
        """Read a file.

        Raises:
            HyperGPUError: FILE_UNUSABLE.
        """
        try:
            return cls(decode_recording(path.read_bytes()))
        except (OSError, RecordingError) as error:
            raise HyperGPUError(Reason.FILE_UNUSABLE, f"recording {path}: {error}") from error

    def hello(self) -> HelloFrame:
        """First frame of a connection."""
        address = str(self._frames[0][1]["state"]["coordinator"]["address"])
        return HelloFrame(PROTOCOL, "recording", 0, "viewer", address, recorded=True)

    async def frames(self) -> AsyncIterator[bytes]:
        """Every frame at its time."""
        before_ms = self._frames[0][0]
        for at_ms, frame in self._frames:
            await asyncio.sleep(min(GAP_MOST_MS, max(0, at_ms - before_ms)) / 1000)
            before_ms = at_ms
            yield msgspec.json.encode(frame)

    @property
    def state(self) -> dict[str, object]:
        """State at the end."""
        from dashboard_api.core.changes import apply_changes, json_copy

        tree: dict[str, object] = json_copy(self._frames[0][1]["state"])
        for _, frame in self._frames[1:]:
            apply_changes(tree, frame.get("changes") or ())
        return tree
