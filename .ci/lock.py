"""Write one lock file: every distribution that pip resolves, as ``name==version`` and nothing else.

No addresses and no hashes of files, so that a lock holds wherever packages come from.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LINUX_ONLY = re.compile(r"^(nvidia-|cuda-|triton$)")
LINUX_MARKER = " ; sys_platform == 'linux' and platform_machine == 'x86_64'"
HEADER = "# Written by `make lock` from: {requirements}. Installed with --no-deps.\n"


def resolve(requirements: list[str]) -> dict[str, str]:
    """Ask pip which version of what a fresh environment would get."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", str(report), *requirements], check=True)
        installs = json.loads(report.read_bytes())["install"]
    names = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in installs}
    return {name: version for name, version in names.items() if name != "hypergpu"}


def lock_text(requirements: list[str], pins: dict[str, str]) -> str:
    """Return the lock file's text, sorted by name."""
    lines = [
        f"{name}=={version}{LINUX_MARKER if LINUX_ONLY.match(name) else ''}\n"
        for name, version in sorted(pins.items())
    ]
    return HEADER.format(requirements=" ".join(requirements)) + "".join(lines)


def pins_of(lock: Path) -> set[tuple[str, str]]:
    """Read a lock file's names and versions."""
    found = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return set(found)


def main() -> None:
    """Lock the requirements; what ``--beside`` already pins to the same version is left out."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("requirements", nargs="+")
    parser.add_argument("--beside", type=Path)
    options = parser.parse_args()
    pins = resolve(options.requirements).items()
    beside = pins_of(options.beside) if options.beside else set()
    text = lock_text(options.requirements, dict(pins - beside))
    options.target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
