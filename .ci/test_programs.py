"""Install the programs that tests drive and this machine lacks, with apt-get.

As root, after a question where a person sits at the terminal; elsewhere it prints the one command.
Always ends with 0: the tests that can run, run all the same, and name those that did not.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.programs import find_program, install_command, lacking_packages

INSTALL = ("apt-get", "install", "-y", "-qq", "--no-install-recommends")


def main() -> int:
    """Install what is missing, or say how; returns 0."""
    packages = lacking_packages()
    if not packages:
        return 0
    command = install_command(packages, is_root=os.geteuid() == 0)
    if find_program("apt-get") is None:
        print(f"Some tests need programs that Debian has in {', '.join(packages)}.")
    elif os.geteuid() != 0:
        print(f"Some tests need more programs. Fix: {command}")
    elif not may_install(packages):
        print(f"Their tests are left out. Later: {command}")
    elif status := install(packages):
        print(f"apt-get failed with status {status}. Fix: {command}")
    return 0


def may_install(packages: Sequence[str]) -> bool:
    """Ask the person at the terminal; without one, yes."""
    print(f"Some tests need programs that are not here: {' '.join(packages)}", flush=True)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    return input("Install them with apt-get? [Y/n] ").strip().lower() in {"", "y", "yes"}


def install(packages: Sequence[str]) -> int:
    """Install packages; returns apt-get's exit status."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}

    def run(*command: str) -> int:
        quiet = subprocess.DEVNULL
        process = subprocess.run(command, check=False, env=environment, stdin=quiet, stdout=quiet)
        return process.returncode

    run("apt-get", "update", "-qq")
    return run(*INSTALL, *packages)


if __name__ == "__main__":
    sys.exit(main())
