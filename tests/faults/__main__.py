"""Plant each fault in a clone of the newest commit and run its tests there, of which one has to
fail, and to pass again without the fault.

A patch begins with a sentence on the fault and a line ``Tests:`` with the paths that are run, up to
their first failure. Tests may be replaced by faster ones as long as every fault is still found.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
_FAILED = "FAILED "
"""Beginning of the line in which pytest names a test that failed."""


class PlantedFault(NamedTuple):
    """A patch of the product."""

    name: str
    patch: Path
    tests: tuple[str, ...]
    """Paths below the root."""


def planted_faults() -> Iterator[PlantedFault]:
    """Every fault of this folder, in the order of their names."""
    for patch in sorted(FOLDER.glob("*.patch")):
        line = next(text for text in patch.read_text().splitlines() if text.startswith("Tests: "))
        yield PlantedFault(patch.stem, patch, tuple(line.removeprefix("Tests: ").split()))


def main() -> int:
    """Plant the faults asked for; the exit status is 1 when one of them was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    fault_list = [*planted_faults()]
    fault_names = ", ".join(each.name for each in fault_list)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {fault_names}; none: all")
    parser.add_argument("--workers", default="2")
    options = parser.parse_args()
    if unknown_names := set(options.names) - {each.name for each in fault_list}:
        parser.error(
            f"no fault is called {', '.join(sorted(unknown_names))}. Fix: name one of {fault_names}"
        )
    faults = [each for each in fault_list if not options.names or each.name in options.names]
    missed_faults = [fault.name for fault in faults if not _is_found(fault, options.workers)]
    _say(f"{len(faults) - len(missed_faults)} of {len(faults)} planted faults were found")
    return 1 if missed_faults else 0


def _is_found(fault: PlantedFault, workers: str) -> bool:
    started_at_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        _run("git", "clone", "--quiet", "--shared", str(ROOT), str(tree), folder=ROOT)
        (tree / "node_modules").symlink_to(ROOT / "node_modules")
        _run("git", "apply", str(fault.patch), folder=tree)
        output = _test(tree, "-n", workers, *fault.tests)
        failures = [line for line in output.splitlines() if line.startswith(_FAILED)]
        _run("git", "apply", "--reverse", str(fault.patch), folder=tree)
        names = [line.removeprefix(_FAILED).split(" - ")[0] for line in failures]
        again = _test(tree, "-n", "0", *names) if names else ""
    is_found = bool(failures) and _FAILED not in again and " passed" in again
    took_s = time.monotonic() - started_at_s
    _say(f"{fault.name}: {'found' if is_found else 'MISSED'} ({took_s:.0f} s)")
    _say("\n".join(f"  {line}" for line in failures))
    if not is_found:
        _say((again or output)[-2000:])
    return is_found


def _test(tree: Path, *arguments: str) -> str:
    """Output of pytest, which stops at the first failure."""
    command = (sys.executable, "-m", "pytest", "-q", "-x", *arguments)
    return subprocess.run(command, cwd=tree, check=False, capture_output=True, text=True).stdout


def _run(*command: str, folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True)


def _say(text: str) -> None:
    if text:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
