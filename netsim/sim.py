"""`make sim`: many seeded worlds in which a lot goes wrong, each failure with its reproduction."""

import argparse
import os
import sys
import time
from collections.abc import Sequence

from hypergpu.units import several
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import SimulatedWorld, calm_world, random_world


def main(words: Sequence[str] | None = None) -> int:
    """Run the worlds asked for; the exit status is 1 when one of them broke an invariant.

    Args:
        words: The command's; None: those of this process.
    """
    arguments = _arguments(words)
    if arguments.scale:
        nodes, _, rounds = arguments.scale.partition("x")
        worlds = [calm_world(arguments.seed or 0, int(nodes), int(rounds))]
    elif arguments.seed is not None:
        worlds = [random_world(arguments.seed)]
    else:
        worlds = [random_world(seed) for seed in range(arguments.seeds)]
    return _report(worlds, shows_journals=arguments.journals)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m netsim.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many random worlds")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--scale", help="NODESxROUNDS of one calm world, for example 1000x100")
    parser.add_argument(
        "--journals",
        action="store_true",
        help="a line for each job with the digest of its journal's bytes: two versions of the code "
        "that behave alike print the same",
    )
    return parser.parse_args(words)


def _report(worlds: list[SimulatedWorld], *, shows_journals: bool) -> int:
    started_s = time.monotonic()
    failed_count = 0
    rounds = events = 0
    for world in worlds:
        outcome = Simulation(world).run()
        rounds += outcome.rounds
        events += outcome.callbacks
        for job_id, digest in outcome.journals.items() if shows_journals else ():
            _say(f"seed {world.seed}: {job_id} {digest}")
        for violation in outcome.violations:
            failed_count += 1
            _say(f"seed {world.seed}: {violation}")
            _say(f"  again: python -m netsim.sim --seed {world.seed}")
    seconds = time.monotonic() - started_s
    counts = ((len(worlds), "world"), (rounds, "round"), (events, "event"))
    _say(f"{', '.join(several(*each) for each in counts)} in {seconds:.1f} s")
    _say(f"{len(worlds) - failed_count} passed, {failed_count} failed")
    return 1 if failed_count else 0


def _say(line: str) -> None:
    sys.stdout.write(line + os.linesep)


if __name__ == "__main__":
    sys.exit(main())
