"""The way of a reader through a function: every function that one call of it enters, each once, in
the order of calls, and how often that leads back to a module already left.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from benchmarks.house.tree import ROOT


class Walk(NamedTuple):
    """Stops are changes of module."""

    stops: tuple[str, ...]
    """Modules in the order of reading, as paths below the root; no two neighbours are equal."""

    @property
    def rooms(self) -> int:
        """Different modules."""
        return len(set(self.stops))

    @property
    def returns(self) -> int:
        """Stops at a module that was already left."""
        return len(self.stops) - self.rooms


def walk_of(call: Callable[[], Any], below: str) -> Walk:
    """Walk through a call.

    Args:
        call: Called once; it may not change what is traced itself.
        below: Folder whose functions are read, such as ``coordinator/core/plan``.
    """
    folder, seen, stops = str(ROOT / below), set[tuple[str, int]](), list[str]()

    def enter(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        place = code.co_filename, code.co_firstlineno
        is_function = code.co_flags & 0x2 and not code.co_name.startswith("<")
        if event != "call" or not is_function or place in seen:
            return
        if not code.co_filename.startswith(folder):
            return
        seen.add(place)
        module = str(Path(code.co_filename).relative_to(ROOT))
        if not stops or stops[-1] != module:
            stops.append(module)

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(tuple(stops))
