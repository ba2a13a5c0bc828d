"""`python -m netsim.reference`: measure real netem under a virtual clock, twice."""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from netsim.reference import guest, initrd, machine, report, requirements
from netsim.reference.cells import MIDDLE, Cell, cells
from netsim.refusal import RefusedError
from netsim.tc.plan import plan

BUILD = Path("build")
RESULT = "netsim-reference.json"


def chosen(names: str) -> tuple[Cell, ...]:
    """Return the cells of these names, with commas; all without a name."""
    known = {cell.name: cell for cell in cells()}
    wanted = names.split(",") if names else list(known)
    for name in wanted:
        if name not in known:
            raise RefusedError(f"the reference has no cell {name!r}", f"name of {', '.join(known)}")
    return tuple(known[name] for name in wanted)


def measure(wanted: Sequence[Cell], runs: int) -> report.Reference:
    """Boot the guest so many times and require the same answers of all.

    Raises:
        RefusedError: They differ, or something is missing.
    """
    requirements.require_programs()
    folder = BUILD / "reference"
    kernel = requirements.kernel(folder / "kernel")
    world = plan({cell.name: cell.link for cell in wanted}, MIDDLE, prefix="netsim")
    archive = folder / "initrd"
    init = guest.script(world, wanted, python=initrd.python_path())
    archive.write_bytes(initrd.build(kernel, init))
    begun = time.monotonic()
    boot = partial(machine.run, requirements.image(kernel), archive)
    with ThreadPoolExecutor(runs) as boots:
        # At once, so that they also disturb each other.
        consoles = list(boots.map(boot, [folder / f"console-{n}.txt" for n in range(1, runs + 1)]))
    say(f"{runs} boots at once took {time.monotonic() - begun:.0f} s")
    if len(set(consoles)) > 1:
        raise RefusedError(
            "the guest gave different answers to the same questions",
            f"compare the consoles in {folder}; something in the guest is random",
        )
    release = requirements.image(kernel).name.removeprefix("vmlinuz-")
    measured = guest.answers(consoles[0])
    return report.reference(release, runs, cells=wanted, measured=measured)


def say(line: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure, print the table and write the file."""
    parser = argparse.ArgumentParser(prog="python -m netsim.reference", description=main.__doc__)
    parser.add_argument("--cells", default="", help="names with commas; all unless said")
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    try:
        found = measure(chosen(options.cells), options.runs)
    except RefusedError as refused:
        sys.exit(str(refused))
    target = BUILD / RESULT
    target.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    say(report.table(found))
    say(f"Linux {found.kernel}, {found.runs} runs, the same to the bit. Written to {target}")


if __name__ == "__main__":
    main()
