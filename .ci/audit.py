"""Look up what is known against the versions in our locks, with pip-audit.

Where its database cannot be reached, one sentence says so and nothing fails: a mirror of the index
need not have it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PIP_AUDIT = [str(ROOT / ".venv-audit" / "bin" / "pip-audit"), "--progress-spinner", "off"]
OPTIONS = ["--format", "json", "--disable-pip", "--require-hashes", "--requirement"]


def main() -> int:
    """Print what is known against the locks' versions; returns 1 where anything is."""
    is_flawed = False
    for lock in sorted(ROOT.glob("locks/*.txt")):
        versions = look_up(lock)
        known_versions = [each for each in versions if "vulns" in each]
        if not known_versions:
            print("The database of vulnerabilities cannot be reached from here: nothing was found.")
            break
        flaws = [line for each in known_versions for line in flaws_of(each)]
        is_flawed |= bool(flaws)
        print(
            f"{lock.name}: {len(known_versions)} of {len(versions)} versions known",
            *flaws,
            sep="\n  ",
        )
    return int(is_flawed)


def look_up(lock: Path) -> list[dict[str, Any]]:
    """Return pip-audit's entry of each version; none where it cannot ask."""
    command = [*PIP_AUDIT, *OPTIONS, str(lock)]
    answer = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    versions: list[dict[str, Any]] = json.loads(answer)["dependencies"] if answer else []
    return versions


def flaws_of(version: dict[str, Any]) -> list[str]:
    """Return a line for each thing known against a version."""
    return [
        f"{version['name']} {version['version']}: {flaw['id']}, mended in"
        f" {', '.join(flaw['fix_versions']) or 'no version yet'}"
        for flaw in version["vulns"]
    ]


if __name__ == "__main__":
    sys.exit(main())
