"""`make sim`: many seeded worlds in which a lot goes wrong, each failure with its reproduction."""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

from hypergpu.units import several
from netsim.link.error import NetsimError
from netsim.network.world_file import read_world_file
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.sizes import TransferSizes
from netsim.virtual.worlds import SimulatedWorld, calm_world, described_world, random_world


def main() -> int:
    """Run the worlds asked for; the exit status is 1 when one of them broke an invariant."""
    arguments = _arguments()
    if arguments.world is not None:
        return _run_described(
            arguments.world, TransferSizes(arguments.model_bytes, arguments.update_bytes)
        )
    if arguments.scale:
        nodes, _, rounds = arguments.scale.partition("x")
        return _report([calm_world(arguments.seed or 0, int(nodes), int(rounds))])
    if arguments.seed is not None:
        return _report([random_world(arguments.seed)])
    return _report([random_world(seed) for seed in range(arguments.seeds)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m netsim.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many random worlds")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--scale", help="NODESxROUNDS of one calm world, for example 1000x100")
    parser.add_argument("--world", type=Path, help="a world file, with what its rounds took")
    parser.add_argument("--model-bytes", type=int, default=400_000, help="of the world's job")
    parser.add_argument("--update-bytes", type=int, default=100_000, help="of the world's job")
    return parser.parse_args()


def _run_described(path: Path, sizes: TransferSizes) -> int:
    try:
        world = described_world(read_world_file(path), sizes)
    except NetsimError as refused:
        _say(str(refused))
        return 2
    outcome = Simulation(world).run()
    for line in _outcome_lines(outcome):
        _say(line)
    return 1 if outcome.violations else 0


def _outcome_lines(outcome: WorldOutcome) -> list[str]:
    """What a reader wants to know of one world."""
    lines = [*outcome.violations]
    for job_id, journal in outcome.journals.items():
        round_ms = outcome.round_ms[job_id]
        if round_ms:
            lines.append(
                f"{job_id}: {several(len(round_ms), 'round')} in {outcome.virtual_ms / 1000:.1f} s,"
                f" each {min(round_ms) / 1000:.1f} to {max(round_ms) / 1000:.1f} s, "
                f"half of them under {median(round_ms) / 1000:.1f} s"
            )
        refused = several(outcome.refused[job_id], "update")
        lines.append(f"{job_id}: {refused} refused; journal {journal}")
    for node, took in outcome.transfers.items():
        if took.downloads_ms and took.uploads_ms:
            down, up = median(took.downloads_ms), median(took.uploads_ms)
            lines.append(f"{node}: a model down in {down:.0f} ms, an update up in {up:.0f} ms")
    return lines


def _report(worlds: list[SimulatedWorld]) -> int:
    started = time.monotonic()
    failed = 0
    rounds = deeds = 0
    for world in worlds:
        outcome = Simulation(world).run()
        rounds += outcome.rounds
        deeds += outcome.deeds
        for violation in outcome.violations:
            failed += 1
            _say(f"seed {world.seed}: {violation}")
            _say(f"  again: python -m netsim.sim --seed {world.seed}")
    seconds = time.monotonic() - started
    done = ((len(worlds), "world"), (rounds, "round"), (deeds, "deed"))
    _say(f"{', '.join(several(*each) for each in done)} in {seconds:.1f} s")
    _say(f"{len(worlds) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _say(line: str) -> None:
    sys.stdout.write(line + os.linesep)


if __name__ == "__main__":
    sys.exit(main())
