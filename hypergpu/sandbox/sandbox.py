"""A sandbox: no network, no file but its process's own, its inputs, Python and devices.

bubblewrap sets it up where it may; else the process confines itself. What works is tried once, with
the very paths that processes get.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.sandbox.confinement import VARIABLE, confinement_text

_TRIAL_S = 20.0
INSTALL_SANDBOX = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap)"
_ALLOW = (
    "or let this user make user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0"
)
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store")
_SETTINGS = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "OpenCL")
_KERNEL = ("bus", "class", "dev", "devices", "module")
_ABOUT_MACHINE = (
    *("cpuinfo", "devices", "driver", "filesystems", "loadavg", "meminfo", "modules", "self"),
    *("stat", "sys", "version"),
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_GPU_DEVICES = ("nvidia*", "dri", "kfd", "dxg")
_KEPT = frozenset(
    {"HYPERGPU_DATASETS", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ"}
)
_KEPT_BEGINNINGS = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "HIP_", "HSA_", "ROCR_", "NVIDIA_", "OMP_", "OPENBLAS_"),
    *("MKL_", "KMP_", "PYTHON", "PYTORCH_", "TORCH_", "LC_", "HYPERGPU_WORKER_"),
)


class SandboxKind(StrEnum):
    """Sandboxes, and what an owner may choose instead."""

    AUTO = "auto"
    BWRAP = "bwrap"
    LANDLOCK = "landlock"
    OFF = "off"


class WorkerFolders(NamedTuple):
    """The parts of the machine that a worker sees beside Python and the system's libraries."""

    writable: tuple[Path, ...]
    """The first one is its home and the place of its temporary files."""
    readable: tuple[Path, ...]
    hidden: tuple[Path, ...]
    """Never seen, whatever else lies around them: the node's folder, its passphrase and the owner's
    data. Without links.
    """
    has_gpu: bool = True


class Sandbox(NamedTuple):
    """A sandbox that was tried."""

    kind: SandboxKind
    """OFF: there is none."""
    text: str
    """For people: its name, or ``unsandboxed`` with the reason and the fix."""
    folders: WorkerFolders

    def with_readable(self, folder: Path) -> "Sandbox":
        """The same one, in which a further folder can be read, with others of data in it."""
        readable = (*self.folders.readable, folder)
        hidden_paths = tuple(
            each
            for each in self.folders.hidden
            if not (each.is_relative_to(folder) and each.is_dir())
        )
        folders = self.folders._replace(readable=readable, hidden=hidden_paths)
        return self._replace(folders=folders)

    def with_home(self, folder: Path) -> "Sandbox":
        """The same one with another home."""
        writable = (folder, *self.folders.writable[1:])
        return self._replace(folders=self.folders._replace(writable=writable))

    def command(self, command: Sequence[str]) -> tuple[str, ...]:
        """A worker's command line, in the sandbox."""
        if self.kind is not SandboxKind.BWRAP:
            return tuple(command)
        # Ctrl-C reaches the whole process group and must not end it: the daemon decides.
        shared_memory = str(self.folders.writable[0] / "shm")
        begin = 'trap "" INT; mkdir -p "$0"; exec "$@"'
        return ("/bin/sh", "-c", begin, shared_memory, *_bwrap_arguments(self.folders), *command)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """A worker's environment: what Python and the drivers need, and none of the secrets."""
        home = str(self.folders.writable[0])
        variables = worker_environment(environment) | {
            "HOME": home,
            "TMPDIR": home,
            "USER": "worker",
            "HYPERGPU_DATASETS": str(datasets_folder(environment)),
        }
        if self.kind is SandboxKind.LANDLOCK:
            readable = _around(_readable(self.folders), self.folders.hidden)
            devices = [path for path in readable if _is_device(path)]
            variables[VARIABLE] = confinement_text(readable, self.folders.writable, devices)
        return variables


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Those variables that a worker may see."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT or name.startswith(_KEPT_BEGINNINGS)
    }


def datasets_folder(environment: Mapping[str, str]) -> Path:
    """The folder of public datasets, as the workloads find it."""
    path_text = environment.get("HYPERGPU_DATASETS")
    return Path(path_text) if path_text else Path.home() / ".cache" / "hypergpu" / "datasets"


def chosen_sandbox(wanted: SandboxKind, folders: WorkerFolders) -> Sandbox:
    """The best sandbox that starts here, of those that are wanted. Blocks.

    Raises:
        HyperGPUError: MACHINE_UNFIT, the owner named one and it does not start.
    """
    if wanted is SandboxKind.OFF:
        return Sandbox(SandboxKind.OFF, "unsandboxed: its owner chose sandbox off", folders)
    kinds = [SandboxKind.BWRAP, SandboxKind.LANDLOCK] if wanted is SandboxKind.AUTO else [wanted]
    complaints = []
    for kind in kinds:
        sandbox = Sandbox(kind, kind.value, folders)
        if not (complaint := _complaint(sandbox)):
            return sandbox
        complaints.append(f"{kind.value}: {complaint}")
    why = "; ".join(complaints)
    if wanted is not SandboxKind.AUTO:
        fix = f"{INSTALL_SANDBOX}, {_ALLOW}; or choose sandbox auto"
        raise HyperGPUError(Reason.MACHINE_UNFIT, f"the sandbox does not start: {why}", fix=fix)
    return Sandbox(
        SandboxKind.OFF, f"unsandboxed ({why}). Fix: {INSTALL_SANDBOX}, {_ALLOW}", folders
    )


def _complaint(sandbox: Sandbox) -> str:
    """Why a sandbox does not start here; empty: it does."""
    program = "from hypergpu.sandbox.confinement import confine_if_told; confine_if_told(); "
    program += "import msgspec"
    if sandbox.kind is SandboxKind.BWRAP and shutil.which("bwrap") is None:
        return "it is not installed"
    command = sandbox.command((sys.executable, "-P", "-c", program))
    environment = sandbox.environment(os.environ)
    try:
        trial = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TRIAL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)[:200]
    if trial.returncode == 0:
        return ""
    lines = trial.stderr.decode("utf-8", "replace").strip().splitlines() or ["it says nothing"]
    return lines[-1][:200]


def _bwrap_arguments(folders: WorkerFolders) -> list[str]:
    """Everything is hidden; later arguments lie over earlier ones."""
    home = str(folders.writable[0])
    shared_memory = folders.writable[0] / "shm"
    arguments = ["bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"]
    arguments += ["--proc", "/proc", "--dir", "/tmp"]  # noqa: S108
    readable = [
        each
        for each in _readable(folders)
        if not each.is_relative_to("/proc") and each.resolve() not in folders.hidden
    ]
    outer = [each for each in readable if not _lies_in(each.resolve(), folders.hidden)]
    covers = _covers(outer, folders.hidden)
    for path in outer:
        words = ("--symlink", str(path.readlink())) if _is_top_link(path) else _bound(path)
        arguments += [*words, str(path)]
    for path in covers:
        cover = ("--tmpfs",) if path.is_dir() else ("--ro-bind", os.devnull)
        arguments += [*cover, str(path)]
    for path in readable:
        if path not in outer:
            arguments += [*_bound(path), str(path)]
    for path in folders.writable:
        arguments += ["--bind", str(path), str(path)]
    for path in covers:
        arguments += ["--remount-ro", str(path)] if path.is_dir() else []
    return [
        *arguments,
        # What else the worker could write to would lie in memory, beside its limit.
        *(
            "--bind",
            str(shared_memory),
            "/dev/shm",  # noqa: S108
            "--remount-ro",
            "/",
        ),
        *("--chdir", home, "--"),
    ]


def _is_top_link(path: Path) -> bool:
    """Whether a path is a link such as ``/lib``, which the sandbox gets as a link."""
    return path.is_symlink() and path.parent == Path("/")


def _covers(outer: Iterable[Path], hidden: Iterable[Path]) -> list[Path]:
    """Where what is hidden would be seen in the folders that are bound, by way of links too."""
    bound = [(each, each.resolve()) for each in outer if not _is_top_link(each)]
    places = [
        path / each.relative_to(real)
        for each in hidden
        for path, real in bound
        if each.is_relative_to(real)
    ]
    return [each for each in dict.fromkeys(places) if each.exists()]


def _bound(path: Path) -> tuple[str, ...]:
    return ("--dev-bind-try" if _is_device(path) else "--ro-bind-try", str(path))


def _is_device(path: Path) -> bool:
    """Whether it is one of the devices that a worker is given: drivers and libraries write them."""
    return path.is_relative_to("/dev")


def _readable(folders: WorkerFolders) -> list[Path]:
    """All that a worker reads, in the order in which it is to be bound."""
    gpus = _GPU_DEVICES if folders.has_gpu else ()
    readable_paths = [
        *(Path(each) for each in _SYSTEM),
        *(Path("/etc") / each for each in _SETTINGS),
        *(Path("/sys") / each for each in _KERNEL),
        *(Path("/proc") / each for each in _ABOUT_MACHINE),
        *(Path("/dev") / each for each in _DEVICES),
        *(path for pattern in gpus for path in Path("/dev").glob(pattern)),
        *_own_python_folders(),
        *folders.readable,
    ]
    return list(dict.fromkeys(path for path in readable_paths if path.exists()))


def _own_python_folders() -> list[Path]:
    """Where this Python finds itself and its packages."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    executable = Path(sys.executable)
    folder_names = [*prefixes, str(executable.parent), str(executable.resolve().parent), *sys.path]
    folder_names += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return python_folders(Path(each) for each in folder_names if each)


def python_folders(found: Iterable[Path]) -> list[Path]:
    """The folders of a Python that a worker may read; never a home or what lies around one."""
    home = Path.home()
    return [each for each in sorted(found) if each.is_absolute() and not home.is_relative_to(each)]


def _lies_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _around(paths: Iterable[Path], hidden: Sequence[Path]) -> list[Path]:
    """The paths without what is hidden: a folder that holds it is named by its other entries, but
    for links, which open nothing.
    """
    visible_paths: list[Path] = []
    for path in paths:
        # What /proc/self is, the worker finds out.
        real = path if path.is_relative_to("/proc") else path.resolve()
        if real in hidden:
            continue
        is_around = any(each.is_relative_to(real) for each in hidden)
        entries = (each for each in real.iterdir() if not each.is_symlink()) if is_around else ()
        visible_paths += _around(entries, hidden) if is_around else [path]
    return visible_paths
