"""Print breaches of the naming and structure rules below a folder, the code lines of each package,
or the walk through a plan.
"""

import argparse
import sys
from collections.abc import Iterator

from tests.architecture.offenders import offenders_below
from tests.architecture.tree import package_lines
from tests.architecture.walk import plan_walk


def main() -> None:
    """Print what the options ask for."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture", description=__doc__)
    parser.add_argument("--offenders", metavar="PATH", default=".", help="a folder or file")
    parser.add_argument("--lines", action="store_true", help="code lines of each package")
    parser.add_argument("--plan-walk", action="store_true", help="modules in the order of reading")
    options = parser.parse_args()
    if options.lines:
        lines = _package_lines()
    elif options.plan_walk:
        lines = _plan_walk()
    else:
        lines = _breaches(options.offenders)
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _package_lines() -> Iterator[str]:
    """Yield sizes without blanks, comments, docstrings and generated files."""
    for package, count in package_lines().items():
        yield f"{package} {count}"


def _plan_walk() -> Iterator[str]:
    walk = plan_walk()
    yield from walk.stops
    yield f"{len(walk.stops)} stops, {walk.rooms} modules, {walk.returns} returns"


def _breaches(path: str) -> Iterator[str]:
    breaches = offenders_below(path)
    for rule, offenders in breaches.items():
        for offender in offenders:
            yield f"{rule}: {offender}"
    for rule, offenders in breaches.items():
        yield f"{rule} {len(offenders)}"


if __name__ == "__main__":
    main()
