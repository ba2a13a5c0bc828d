"""The same items by our nodes and by Ray's workers, behind the same lines of two homes.

Lines are opened for each anew, by the same profiles and seed. Where Ray does not start or end its
tasks there, a note has its words in place of a figure.
"""

import sys
from collections.abc import Sequence

import msgspec

from benchmarks.ours.awareness.links import sound_output
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.table import PartFigures
from benchmarks.peers.line_items import LineRate, RayBlocked, RayOutcome, RayRates
from netsim.link import NetsimError
from netsim.tunnel.tunnel import require_tunnel

PROFILES = ("home-fibre", "home-cable")
_SEED = 1
FLOOR_MS = 20
WANTED = 1.5
_LIMIT_S = 900.0
_RATIO = "items a second over Ray's, behind the same lines"


def over_home_lines(command: Sequence[str]) -> list[str]:
    """The command that runs another over a line of each profile."""
    shape = [sys.executable, "-m", "netsim", "shape", *PROFILES]
    # Ray's default hangs on a token in the home folder; nobody outside reaches these namespaces.
    return [
        *(*shape, "--seed", str(_SEED), "--backend", "tunnel", "--"),
        *("env", "RAY_AUTH_MODE=disabled", *command),
    ]


def said_over_lines(module: str, items: int) -> bytes:
    """The last line of a script that ran over the lines.

    Raises:
        BenchmarkError: It said why not, or its lines were late.
    """
    command = [sys.executable, "-m", module, str(items), str(FLOOR_MS)]
    return sound_output(module.rpartition(".")[2], over_home_lines(command), _LIMIT_S)


def line_figures(items: int) -> PartFigures:
    """Measure ours, then Ray's.

    Raises:
        BenchmarkError: This machine has no lines, or ours could not be measured.
    """
    try:
        require_tunnel()
    except NetsimError as error:
        raise BenchmarkError(f"{error.detail}. Fix: {error.fix}") from error
    ours_line = said_over_lines("benchmarks.ours.farm.farm_over_lines", items)
    ours = msgspec.json.decode(ours_line, type=LineRate)
    ray_line = said_over_lines("benchmarks.peers.ray_lines", items)
    ray: RayOutcome = msgspec.json.decode(ray_line, type=RayOutcome)
    if isinstance(ray, RayBlocked):
        return blocked_figures(ours, ray)
    return compared_figures(ours, ray, items)


def compared_figures(ours: LineRate, ray: RayRates, items: int) -> PartFigures:
    """Ours over the faster of Ray's two ways."""
    faster = max(ray.bundles, ray.singles)
    ratio = ours.items_per_s / faster
    single_ratio = ours.items_per_s / ray.singles
    return PartFigures(
        rows=[
            (_RATIO, f"{ratio:.2f}", f"{faster:.1f}; {WANTED} wanted"),
            ("the same, Ray with a task an item", f"{single_ratio:.2f}", f"{ray.singles:.1f}"),
        ],
        metrics={
            "lines_items_per_s": round(ours.items_per_s, 1),
            "ray_over_ours_lines": round(ratio, 3),
            "ray_single_over_ours_lines": round(single_ratio, 3),
        },
        notes=[
            f"{items:,} items of {FLOOR_MS} ms, two nodes on a home's fibre and cable, no checks.",
            "Ray's tasks have 50 items, or one. The lines have no NAT: all ports are open.",
        ],
    )


def blocked_figures(ours: LineRate, ray: RayBlocked) -> PartFigures:
    """Ours alone, and what Ray said."""
    return PartFigures(
        rows=[(_RATIO, "blocked", f"ours {ours.items_per_s:.1f}")],
        metrics={"lines_items_per_s": round(ours.items_per_s, 1)},
        notes=[f"blocked, Ray over the lines: {ray.reason}"],
    )
