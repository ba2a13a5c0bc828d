"""torch's DistributedDataParallel between the same hosts: what people use where networks are fast.

A few of its steps are measured over a grade's lines, times the steps that every-step training takes
to the target on loopback, where links cost nothing.
"""

import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.ours.awareness.links import over_links, sound_output
from benchmarks.ours.awareness.runs import DIGITS, GRADES, KEPT, ROOT, times
from benchmarks.ours.table import PartFigures
from hypergpu.crypto import digest_of

STEPS = 5
FLOOR_MS = 50
LIMIT_S = 900
SCRIPT = ROOT / "benchmarks" / "peers" / "ddp.py"


class DdpSteps(msgspec.Struct, frozen=True):
    """What the script reports."""

    seconds_per_step: tuple[float, ...]


def ddp_figures(aware_s: Mapping[str, float], steps: float) -> PartFigures:
    """Time to the target beside ours.

    Args:
        aware_s: Ours on each grade, in seconds.
        steps: How many steps the target takes.

    Raises:
        BenchmarkError: It broke, or the links were late.
    """
    step_s = {grade: ddp_step_s(grade) for grade in aware_s}
    reached_s = {grade: steps * each for grade, each in step_s.items()}
    ratios = {grade: reached_s[grade] / ours_s for grade, ours_s in aware_s.items()}
    measured = ", ".join(f"{each:.2f} s on {grade.upper()}" for grade, each in step_s.items())
    return PartFigures(
        rows=[
            (
                f"{grade.upper()}: to 97 %, DistributedDataParallel over gloo",
                f"{ours_s:.3g} s",
                f"{reached_s[grade]:.3g} s",
                times(ratios[grade]),
                "",
            )
            for grade, ours_s in aware_s.items()
        ],
        metrics={f"ddp_over_aware_{grade}": ratio for grade, ratio in ratios.items()},
        notes=[f"DDP: the median of {STEPS} steps, {measured}, times {steps:g} steps."],
    )


def ddp_step_s(grade: str) -> float:
    """Seconds of a step over a grade's lines, the median of a few after the first."""
    world = GRADES / f"{grade}.toml"
    words = [f"--job={DIGITS}", f"--steps={STEPS}", f"--floor-ms={FLOOR_MS}"]
    kept = KEPT / f"ddp-{grade}-{_key(words, world)}.json"
    sys.stderr.write(f"ddp-{grade}: {STEPS} steps{', kept' if kept.exists() else ''}\n")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        command = over_links([sys.executable, "-m", "benchmarks.peers.ddp", *words], world)
        kept.write_bytes(sound_output(f"ddp-{grade}", command, LIMIT_S))
    return statistics.median(msgspec.json.decode(kept.read_bytes(), type=DdpSteps).seconds_per_step)


def _key(words: list[str], world: Path) -> str:
    text = [path.read_text(encoding="utf-8") for path in (SCRIPT, DIGITS, world)]
    return digest_of(" ".join([*words, *text]).encode())[:16]
