"""Write one lock file: every distribution that pip resolves, with the hashes of its files.

No addresses, so that a lock holds wherever packages come from. Hashes are those of every file that
the index lists for a version: other platforms install from the same lock.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from install import bootstrapped_uv, uv_environment

LINUX_ONLY = re.compile(r"^(nvidia-|cuda-|triton$)")
LINUX_MARKER = " ; sys_platform == 'linux' and platform_machine == 'x86_64'"
INSTALLED = "Installed with --no-deps --require-hashes."
HEADER = "# Written by `make lock` from: {requirements}. " + INSTALLED + "\n"
# They may hold a few of a version's files, and uv stops at the first source that has the version.
PARTIAL_SOURCES = ("UV_INDEX", "UV_FIND_LINKS")


def resolve(requirements: list[str]) -> dict[str, str]:
    """Ask pip which version of what a fresh environment would get."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed"]
        subprocess.run([*pip, "--report", str(report), *requirements], check=True)
        installs = json.loads(report.read_bytes())["install"]
    names = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in installs}
    return {name: version for name, version in names.items() if name != "hypergpu"}


def pin_lines(pins: dict[str, str]) -> list[str]:
    """Return one requirement a distribution, sorted by name."""
    return [
        f"{name}=={version}{LINUX_MARKER if LINUX_ONLY.match(name) else ''}\n"
        for name, version in sorted(pins.items())
    ]


def hashed_pins(lines: list[str]) -> str:
    """Return the requirements with the hashes of every file that the default index lists for them.

    Raises:
        SystemExit: There is no uv, or it knows no such version.
    """
    uv = bootstrapped_uv()
    if uv is None:
        sys.exit("uv, which reads the hashes, could not be installed. Fix: make lock again online")
    environment = uv_environment()
    command = [uv, "pip", "compile", "-q", "--generate-hashes", "--no-deps", "--universal"]
    process = subprocess.run(
        [*command, "--no-header", "--no-annotate", "--no-emit-index-url", "-"],
        input="".join(lines),
        check=True,
        capture_output=True,
        text=True,
        env={name: environment[name] for name in environment.keys() - set(PARTIAL_SOURCES)},
    )
    return process.stdout


def pins_of(lock: Path) -> set[tuple[str, str]]:
    """Read a lock file's names and versions."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return set(pins)


def main() -> None:
    """Lock the requirements; what ``--beside`` already pins to the same version is left out."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("requirements", nargs="+")
    parser.add_argument("--beside", type=Path)
    options = parser.parse_args()
    pins = resolve(options.requirements).items()
    beside = pins_of(options.beside) if options.beside else set()
    text = HEADER.format(requirements=" ".join(options.requirements))
    text += hashed_pins(pin_lines(dict(pins - beside)))
    options.target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
