"""torch's DistributedDataParallel between the same hosts: what people use where networks are fast.

A few of its steps are measured over a grade's lines, times the steps that every-step training takes
to the target on loopback, where links cost nothing.
"""

import statistics
import sys
from pathlib import Path

import msgspec

from benchmarks.ours.awareness.links import over_links, sound_output
from benchmarks.ours.awareness.runs import DIGITS, GRADES, KEPT, ROOT, times
from benchmarks.ours.table import PartFigures
from hypergpu.digests import digest_of

STEPS = 5
FLOOR_MS = 50
LIMIT_S = 900
SCRIPT = ROOT / "benchmarks" / "peers" / "ddp.py"


class DdpSteps(msgspec.Struct, frozen=True):
    """What the script reports."""

    seconds_per_step: tuple[float, ...]


def ddp_figures(grade: str, ours_s: float, steps: float) -> PartFigures:
    """Time to the target on a grade beside ours.

    Args:
        grade: Names it.
        ours_s: Ours, in seconds.
        steps: How many steps the target takes.

    Raises:
        BenchmarkError: It broke, or the links were late.
    """
    step_s = ddp_step_s(grade)
    theirs_s = steps * step_s
    what = f"{grade.upper()}: to 97 %, DistributedDataParallel over gloo"
    return PartFigures(
        rows=[(what, f"{ours_s:.3g} s", f"{theirs_s:.3g} s", times(theirs_s / ours_s), "")],
        metrics={f"ddp_over_aware_{grade}": theirs_s / ours_s},
        notes=[
            f"DDP on {grade.upper()}: the median of {STEPS} steps, {step_s:.2f} s, {steps:g} times."
        ],
    )


def ddp_step_s(grade: str) -> float:
    """Seconds of a step over a grade's lines, the median of a few after the first."""
    world = GRADES / f"{grade}.toml"
    words = [f"--job={DIGITS}", f"--steps={STEPS}", f"--floor-ms={FLOOR_MS}"]
    kept_file = KEPT / f"ddp-{grade}-{_key(words, world)}.json"
    sys.stderr.write(f"ddp-{grade}: {STEPS} steps{', kept' if kept_file.exists() else ''}\n")
    if not kept_file.exists():
        kept_file.parent.mkdir(parents=True, exist_ok=True)
        command = over_links([sys.executable, "-m", "benchmarks.peers.ddp", *words], world)
        kept_file.write_bytes(sound_output(f"ddp-{grade}", command, LIMIT_S))
    return statistics.median(
        msgspec.json.decode(kept_file.read_bytes(), type=DdpSteps).seconds_per_step
    )


def _key(words: list[str], world: Path) -> str:
    text = [path.read_text(encoding="utf-8") for path in (SCRIPT, DIGITS, world)]
    return digest_of(" ".join([*words, *text]).encode())[:16]
