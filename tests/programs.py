"""Programs of the machine that some tests drive: which there are, and how to get the others.

`.ci/test_programs.py` installs what is missing. This needs nothing but Python, so that CI reads it
before any environment is made.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
POSTGRES_VARIABLE = "HYPERGPU_TEST_POSTGRES_URL"
WITHOUT_VARIABLE = "HYPERGPU_TEST_WITHOUT"
"""Names of needs, with commas between them, that are taken for absent."""
FAKETIME = "*/faketime/libfaketimeMT.so.1"
_SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class NeededProgram(NamedTuple):
    """A need that tests name by their marker ``needs``."""

    name: str
    packages: tuple[str, ...]
    """Debian packages that bring it; empty: none does."""
    is_here: Callable[[], bool]
    fix: str = ""
    """Remedy where no package is one."""


def find_program(*names: str) -> str | None:
    """Path of the first of these programs that is installed, in folders of the system, too."""
    return next(filter(None, (shutil.which(name, path=_SYSTEM_PATH) for name in names)), None)


def _has(*names: str) -> Callable[[], bool]:
    return lambda: find_program(*names) is not None


def _has_postgres_server() -> bool:
    is_packaged = any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return is_packaged or find_program("initdb") is not None


def _has_database() -> bool:
    return POSTGRES_VARIABLE in os.environ


def _has_faketime() -> bool:
    return any(Path("/usr/lib").glob(FAKETIME))


def _has_namespaces() -> bool:
    return os.geteuid() == 0 and find_program("ip") is not None


def _can_tunnel() -> bool:
    # Imported here: `main` runs before there is anything but Python.
    from netsim.link import NetsimError
    from netsim.tunnel.tunnel import require_tunnel

    try:
        require_tunnel()
    except NetsimError:
        return False
    return True


PROGRAMS = (
    NeededProgram("chromium", ("chromium",), _has(*CHROMIUM_NAMES)),
    NeededProgram("sshd", ("openssh-server", "openssh-client"), _has("sshd")),
    NeededProgram("redis-server", ("redis-server",), _has("redis-server")),
    NeededProgram("postgres server", ("postgresql",), _has_postgres_server),
    NeededProgram("faketime", ("libfaketime",), _has_faketime),
    NeededProgram("bwrap", ("bubblewrap",), _has("bwrap")),
    NeededProgram("ip", ("iproute2",), _has("ip")),
    NeededProgram("git", ("git",), _has("git")),
    NeededProgram("database", (), _has_database, f"install postgresql or set {POSTGRES_VARIABLE}"),
    NeededProgram("namespaces", (), _has_namespaces, "run as root"),
    NeededProgram("tunnel", (), _can_tunnel, "run as root where /dev/net/tun is"),
)
NEEDS = {program.name: program for program in PROGRAMS}


def missing_needs() -> frozenset[str]:
    """Names of the needs that this machine does not meet."""
    without = os.environ.get(WITHOUT_VARIABLE, "").split(",")
    return frozenset(
        name for name, program in NEEDS.items() if name in without or not program.is_here()
    )


def lacking_packages(programs: Iterable[NeededProgram] = PROGRAMS) -> tuple[str, ...]:
    """Packages that bring what is not here."""
    return tuple(
        name for each in programs if each.packages and not each.is_here() for name in each.packages
    )


def install_command(packages: Sequence[str], *, is_root: bool) -> str:
    """The one command that installs these packages."""
    return f"{'' if is_root else 'sudo '}apt-get install -y {' '.join(packages)}"
