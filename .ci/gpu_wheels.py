"""Fetch the wheels that `make bench-gpu` needs on a machine that has Python and torch and no index.

Versions are those of the lock; torch and numpy are the machine's own.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "locks" / "dev.txt"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
OWN = ("torch", "torchvision", "numpy")
TESTS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout")


def main() -> int:
    """Fetch into a folder; returns pip's status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("python", help="the machine's Python, as 3.12")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(pins(LOCK.read_text(encoding="utf-8"))))
        constraints.flush()
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        command += ["--only-binary=:all:", "--python-version", options.python]
        command += [word for each in PLATFORMS for word in ("--platform", each)]
        command += ["-c", constraints.name, "-d", str(options.folder), *packages()]
        status = subprocess.run(command, check=False).returncode
    for wheel in options.folder.glob("numpy-*.whl"):
        wheel.unlink()
    size = sum(each.stat().st_size for each in options.folder.glob("*.whl"))
    print(f"{options.folder}: {size / 1e6:.0f} MB for Python {options.python}, x86-64 Linux")
    return status


def packages() -> list[str]:
    """What the project and its tests on a GPU need, torch and numpy aside."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [each for each in project["dependencies"] if name_of(each) not in OWN]
    return [*needs, "pillow", *TESTS]


def pins(lock: str) -> list[str]:
    """``name==version`` of each package that a lock names, the machine's own left out."""
    lines = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==(\S+)", lock, re.MULTILINE)
    return [f"{name}=={version}" for name, version in lines if name_of(name) not in OWN]


def name_of(requirement: str) -> str:
    """The package that a requirement is of."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower()


if __name__ == "__main__":
    raise SystemExit(main())
