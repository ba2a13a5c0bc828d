"""Build `hypergpu-node` as one file: the daemon with all that it needs but torch.

The file runs on the Python version that builds it. Its packages are those of locks/dev.txt.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PEX = ROOT / ".venv-pex" / "bin" / "python"
PROGRAM = "hypergpu-node"
SETTINGS = {"HYPERGPU_NODE_WORKER_PYTHON": "auto"}
"""Without torch in it, the daemon makes an environment that has it, unless told otherwise."""


def main() -> int:
    """Build the file that the first argument names; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    target: Path = parser.parse_args().target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        environment = installed_environment(Path(folder))
        # Copies, since a worker's sandbox shows it the environment and not what links lead to.
        command = [str(PEX), "-m", "pex", "--venv-repository", str(environment), "hypergpu"]
        command += ["--venv", "prepend", "--venv-site-packages-copies", "--script", PROGRAM]
        for name, value in SETTINGS.items():
            command += ["--inject-env", f"{name}={value}"]
        command += ["--python-shebang", "/usr/bin/env python3", "--output-file", str(target)]
        cache = {"PEX_ROOT": str(PEX.parents[1] / "cache")}
        subprocess.run(command, env=os.environ | cache, check=True, stdout=subprocess.DEVNULL)
    return 0


def installed_environment(folder: Path) -> Path:
    """An environment with the wheel of this tree and what it depends on."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    install = [sys.executable, str(ROOT / ".ci" / "install.py"), str(environment)]
    package = ["--package", f"hypergpu @ {wheel.as_uri()}"]
    lock = ["--constraint", str(ROOT / "locks" / "dev.txt")]
    subprocess.run([*install, *package, *lock], check=True)
    return environment


if __name__ == "__main__":
    sys.exit(main())
