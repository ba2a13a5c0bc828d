"""The way of a reader through a function: every function that one call of it enters, each once, in
the order of calls, and how often that leads back to a module already left.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tests.architecture.tree import ROOT


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


def plan_walk() -> Walk:
    """The walk of a plan in which one node works under a lease over several rounds."""
    # They import the coordinator, which the rules do not need.
    from benchmarks.ours.adaptive.fleets import AddedNode, job_spec, run_fleet
    from coordinator.core.plan.planning import plan_round as plan
    from netsim.virtual import node_link

    calls = list[tuple[Any, ...]]()

    def keep(*arguments: Any) -> Any:
        calls.append(arguments)
        return plan(*arguments)

    vars(node_link)["plan_round"] = keep
    try:
        run_fleet(job_spec(inner_steps=20, nodes=4, rounds=10), seed=1, added=(AddedNode(16),))
    finally:
        vars(node_link)["plan_round"] = plan
    return walk_of(lambda: plan(*calls[len(calls) // 2]), "coordinator/core/plan")
