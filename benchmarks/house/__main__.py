"""Print breaches of the naming and structure rules of a folder."""

import argparse
import sys

from benchmarks.house.offenders import offenders_below


def main() -> None:
    """Print each rule's offenders below a folder, and their number."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("--offenders", metavar="PATH", default=".", help="a folder or file")
    found = offenders_below(parser.parse_args().offenders)
    for rule, offenders in found.items():
        for offender in offenders:
            sys.stdout.write(f"{rule}: {offender}\n")
    for rule, offenders in found.items():
        sys.stdout.write(f"{rule} {len(offenders)}\n")


if __name__ == "__main__":
    main()
