"""What the reference needs of this machine: Debian's QEMU, its cloud kernel and a static busybox.

As root they are fetched; everybody else is told what to install. The kernel is unpacked into
the build folder and never installed.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from netsim.reference.machine import QEMU
from netsim.refusal import RefusedError

PACKAGES = {QEMU: "qemu-system-x86", "busybox": "busybox-static", "tc": "iproute2"}
KERNEL = "linux-image-cloud-amd64"
DEPENDENCY = re.compile(r"Depends: (linux-image-\S+-cloud-amd64)")


def require_programs() -> None:
    """Install what is missing, or say what it is.

    Raises:
        RefusedError: Something is missing and cannot be installed from here.
    """
    missing = sorted({PACKAGES[name] for name in PACKAGES if _where(name) is None})
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        what = f"the reference needs {', '.join(missing)}"
        raise RefusedError(what, f"on Debian 12 or later, as root: {' '.join(install)}")
    _run(["apt-get", "update", "-qq"])
    _run([*install, "-qq"])


def kernel(folder: Path) -> Path:
    """Return where the kernel's package is unpacked, fetching it the first time.

    Raises:
        RefusedError: This system's packages have no such kernel.
    """
    if list(folder.glob("boot/vmlinuz-*")):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    depends = _run(["apt-cache", "depends", KERNEL])
    found = DEPENDENCY.search(depends)
    if not found:
        raise RefusedError(f"apt knows no package {KERNEL}", "run it on Debian 12 or later")
    _run(["apt-get", "download", "-qq", found[1]], folder=folder)
    package = next(folder.glob("*.deb"))
    _run(["dpkg-deb", "--extract", str(package), str(folder)])
    package.unlink()
    return folder


def image(folder: Path) -> Path:
    """Return the kernel itself."""
    return next(folder.glob("boot/vmlinuz-*"))


def _where(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


def _run(argv: Sequence[str], *, folder: Path | None = None) -> str:
    try:
        ended = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=folder)
    except FileNotFoundError as error:
        fix = "run it on Debian 12 or later"
        raise RefusedError(f"the program {argv[0]} was not found", fix) from error
    if ended.returncode:
        said = ended.stderr.strip().splitlines()
        raise RefusedError(
            f"{' '.join(argv)} failed: {said[-1] if said else ended.returncode}",
            "run `apt-get update`, or see whether this machine reaches Debian's packages",
        )
    return ended.stdout
