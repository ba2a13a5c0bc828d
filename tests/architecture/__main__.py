"""Print breaches of the naming and structure rules below a folder, the code lines of each package,
or the walk through a plan, an update, a receipt or a fold.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.architecture.offenders import offenders_below
from tests.architecture.tree import package_lines
from tests.architecture.walk import Walk, aggregate_walk, plan_walk, receipt_walk, update_walk

WALKS: dict[str, Callable[[Path], Walk]] = {
    "plan": lambda _folder: plan_walk(),
    "aggregate": aggregate_walk,
    "update": update_walk,
    "receipt": receipt_walk,
}


def main() -> None:
    """Print what the options ask for."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture", description=__doc__)
    parser.add_argument("--offenders", metavar="PATH", default=".", help="a folder or file")
    parser.add_argument("--lines", action="store_true", help="code lines of each package")
    parser.add_argument("--walk", choices=WALKS, help="modules as they are read")
    options = parser.parse_args()
    if options.lines:
        lines = _package_lines()
    elif options.walk:
        lines = _walk(options.walk)
    else:
        lines = _breaches(options.offenders)
    sys.stdout.writelines(f"{line}\n" for line in lines)


def _package_lines() -> Iterator[str]:
    """Yield sizes without blanks, comments, docstrings and generated files."""
    for package, count in package_lines().items():
        yield f"{package} {count}"


def _walk(name: str) -> Iterator[str]:
    with TemporaryDirectory() as folder:
        walk = WALKS[name](Path(folder))
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
