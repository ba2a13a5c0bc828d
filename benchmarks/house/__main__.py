"""Print breaches of the naming and structure rules below a folder, one update's way, or the walk
through a plan.
"""

import argparse
import sys

from benchmarks.house.offenders import offenders_below
from benchmarks.house.trace import traced_files
from benchmarks.house.walk import plan_walk


def main() -> None:
    """Print what the options ask for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("--offenders", metavar="PATH", default=".", help="a folder or file")
    parser.add_argument("--update-way", action="store_true", help="the files of one update's way")
    parser.add_argument("--plan-walk", action="store_true", help="modules in the order of reading")
    options = parser.parse_args()
    if options.update_way:
        sys.stdout.write("\n".join([*traced_files(), ""]))
        return
    if options.plan_walk:
        walk = plan_walk()
        counts = f"{len(walk.stops)} stops, {walk.rooms} modules, {walk.returns} returns"
        sys.stdout.write("\n".join([*walk.stops, counts, ""]))
        return
    found = offenders_below(options.offenders)
    for rule, offenders in found.items():
        for offender in offenders:
            sys.stdout.write(f"{rule}: {offender}\n")
    for rule, offenders in found.items():
        sys.stdout.write(f"{rule} {len(offenders)}\n")


if __name__ == "__main__":
    main()
