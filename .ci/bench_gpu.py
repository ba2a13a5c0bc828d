"""Run the benchmark of this machine's GPU with the Python and torch that it has.

What else the project needs comes from wheels that were carried here: nothing is installed, no index
is asked. Wheels are unpacked into a temporary folder, those of another Python or machine left out.
"""

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

NEEDS = {
    "torch": "torch",
    "aiohttp": "aiohttp",
    "blake3": "blake3",
    "coincurve": "coincurve",
    "cryptography": "cryptography",
    "grpc": "grpcio",
    "msgspec": "msgspec",
    "numpy": "numpy",
    "psutil": "psutil",
    "rich": "rich",
    "sqlalchemy": "sqlalchemy",
    "structlog": "structlog",
    "typer": "typer",
    "uvicorn": "uvicorn",
}
"""Modules without which no part runs, and the packages that bring them."""
ROOT = Path(__file__).parents[1]


def main() -> int:
    """Unpack wheels, check what is there, and go on as the benchmark; returns 2 without that."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use beside this Python's")
    options, words = parser.parse_known_args()
    if options.wheels is not None and not options.wheels.is_dir():
        parser.error(f"--wheels {options.wheels}: there is no such folder")
    with tempfile.TemporaryDirectory(prefix="hypergpu-wheels-") as folder:
        paths = [str(ROOT)]
        if options.wheels is not None:
            unpack(sorted(options.wheels.glob("*.whl")), Path(folder))
            paths.append(folder)
        sys.path[:0] = paths
        if missing_packages := [package for name, package in NEEDS.items() if not is_there(name)]:
            print(advice(missing_packages), file=sys.stderr)
            return 2
        paths += filter(None, [os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "benchmarks.ours.gpu", *words]
        return subprocess.run(command, env=environment, check=False).returncode


def is_there(module: str) -> bool:
    """Whether this Python finds the module."""
    return importlib.util.find_spec(module) is not None


def advice(missing_packages: Iterable[str]) -> str:
    """Say what is missing and the command that fetches it elsewhere."""
    packages = " ".join(missing_packages)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{sys.executable} lacks {packages}. Fix: where there is an index, run"
        f" `make gpu-wheels GPU_PYTHON={version}`, carry build/gpu-wheels here, and run"
        " `make bench-gpu WHEELS=build/gpu-wheels`; torch is the machine's own"
    )


def unpack(wheels: Iterable[Path], folder: Path) -> None:
    """Unpack the wheels that fit this Python and machine."""
    for wheel in wheels:
        if fits(wheel.name):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)


def fits(name: str) -> bool:
    """Whether a wheel's tags, the last three parts of its name, are of this Python and machine."""
    pythons, abis, platforms = name.removesuffix(".whl").split("-")[-3:]
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    is_pure = abis == "none" and "py3" in pythons.split(".")
    # `pip download` was told the version: an older one with a stable interface is fit for it.
    is_own = own in pythons.split(".") or "abi3" in abis.split(".") or is_pure
    return is_own and (platforms == "any" or platforms.endswith(platform.machine()))


if __name__ == "__main__":
    raise SystemExit(main())
