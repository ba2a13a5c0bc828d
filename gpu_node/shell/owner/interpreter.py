"""The Python that runs the worker: the daemon's own, one that the owner names, or that of an
environment which is made here with torch.

Another Python needs nothing of ours: what it lacks, the worker reads from the daemon's packages.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from gpu_node.config import NodeSettings
from gpu_node.shell.owner.limits_file import gpu_figures
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.privacy import public_environment
from hypergpu.protocol import SOFTWARE
from hypergpu.sandbox.sandbox import python_folders
from hypergpu.torch_wheels import torch_arguments

log = structlog.get_logger()

MODULE = "gpu_node.shell.worker"
AUTO = "auto"
_ANSWER_S = 120.0
_PROBE = """
import importlib.metadata, importlib.util, json, os, sys
has = lambda name: importlib.util.find_spec(name) is not None
software = ""
if has("gpu_node"):
    from hypergpu.protocol import SOFTWARE as software
prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
executables = [os.path.dirname(sys.executable), os.path.dirname(os.path.realpath(sys.executable))]
print(json.dumps({
    "tag": sys.implementation.cache_tag, "has_torch": has("torch"), "software": software,
    "torch": next((each.version for each in importlib.metadata.distributions(name="torch")), ""),
    "folders": [each for each in [*prefixes, *executables, *sys.path] if os.path.isabs(each)],
}))
"""
_LAUNCH = "import runpy, sys; sys.path += sys.argv.pop(1).split(':'); "
_LAUNCH += "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


class InterpreterFound(msgspec.Struct, frozen=True):
    """What another Python says of itself."""

    tag: str
    """Its implementation and version, which compiled packages are made for: ``cpython-311``."""
    has_torch: bool
    software: str
    """Name and version of HyperGPU where it has that itself; else empty."""
    folders: tuple[str, ...]
    """All that it reads."""
    torch: str = ""
    """Version of its torch, which ends with ``+cpu`` where it is built for processors alone."""


class WorkerPython(NamedTuple):
    """A Python that can run a worker."""

    kind: str
    """Kind of the worker: torch, numpy or null."""
    path: str = sys.executable
    shared: tuple[str, ...] = ()
    """Folders with the daemon's packages, after its own; none: it needs none of them."""
    folders: tuple[Path, ...] = ()
    """All that it reads, beside what the daemon's own Python reads."""
    torch: str = ""
    """See `InterpreterFound`."""

    @property
    def uses_gpus(self) -> bool:
        """Whether its workers may compute on a GPU."""
        return self.kind == "torch" and not self.torch.endswith("+cpu")

    def command(self, module: str = MODULE) -> tuple[str, ...]:
        """Command line of the worker."""
        return (*self.program(module), "--kind", self.kind)

    def program(self, module: str) -> tuple[str, ...]:
        """Command line of one of our modules, found where the daemon found it."""
        if self.shared:
            return (self.path, "-P", "-c", _LAUNCH, ":".join(self.shared), module)
        is_safe = sys.flags.safe_path or self.path != sys.executable
        return (self.path, *(("-P",) if is_safe else ()), "-m", module)


def worker_kind(wanted: str, *, has_torch: bool) -> str:
    """The kind to spawn: ``auto`` is torch where it is installed, else numpy."""
    if wanted != AUTO:
        return wanted
    return "torch" if has_torch else "numpy"


def worker_python(settings: NodeSettings, state_dir: Path, gpu: str = "") -> WorkerPython:
    """The Python for the worker. Blocks; for minutes where an environment is to be made.

    Args:
        settings: The node's.
        state_dir: Its folder.
        gpu: The owner's choice of a GPU.

    Raises:
        HyperGPUError: WORKER_UNUSABLE, with what it lacks.
    """
    stated_python, kind = settings.worker_python, settings.worker
    has_torch, needs_torch = find_spec("torch") is not None, kind in (AUTO, "torch")
    if not stated_python or (stated_python == AUTO and (has_torch or not needs_torch)):
        chosen_kind = worker_kind(kind, has_torch=has_torch)
        return WorkerPython(chosen_kind, torch=_torch_version() if chosen_kind == "torch" else "")
    if stated_python == AUTO:
        folder = state_dir.with_name(f"{state_dir.name}.worker")
        stated_python = str(make_environment(folder, _machine_arguments(gpu)))
    path = shutil.which(os.path.expanduser(stated_python)) or stated_python  # noqa: PTH111 - a name on PATH, too
    interpreter = ask_interpreter(path)
    ours = InterpreterFound(str(sys.implementation.cache_tag), has_torch, SOFTWARE, ())
    if lack := lack_of(interpreter, ours, path, needs_torch=needs_torch):
        raise lack
    chosen_kind = worker_kind(kind, has_torch=interpreter.has_torch)
    # A link, as environments have for their Python, must stay one: it says where packages lie.
    absolute = os.path.abspath(path)  # noqa: PTH100
    folders = tuple(python_folders(map(Path, interpreter.folders)))
    shared_folders = () if interpreter.software else _own_folders()
    return WorkerPython(chosen_kind, absolute, shared_folders, folders, interpreter.torch)


def gpu_build_command(python: WorkerPython, gpu: str) -> str:
    """What installs the build of torch for the GPUs that the owner lets the worker use."""
    packages = " ".join(repr(each) for each in _machine_arguments(gpu))
    return f"{python.path} -m pip install --force-reinstall {packages}"


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:  # built and not installed
        return ""


def ask_interpreter(path: str) -> InterpreterFound:
    """What a Python says of itself. Blocks.

    Raises:
        HyperGPUError: WORKER_UNUSABLE, it is no Python that starts here.
    """
    command = [path, "-c", _PROBE]
    fix = "name a Python 3.11 or later with torch: --worker-python PATH"
    try:
        output = subprocess.run(
            command,
            cwd="/",
            env=public_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_S,
            check=True,
        ).stdout
        return msgspec.json.decode(output, type=InterpreterFound)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        detail = f"{path} is no Python that runs here: {error}"[:400]
        raise HyperGPUError(Reason.WORKER_UNUSABLE, detail, fix=fix) from error


def lack_of(
    found: InterpreterFound, ours: InterpreterFound, path: str, *, needs_torch: bool
) -> HyperGPUError | None:
    """Why a Python cannot run the worker of this daemon; None: it can."""
    name, _, version = ours.software.partition(" ")
    install = f"{path} -m pip install '{name}[torch]=={version}'"
    if found.software and found.software != ours.software:
        detail = f"{path} has {found.software}, this daemon is {ours.software}"
        return HyperGPUError(Reason.WORKER_UNUSABLE, detail, fix=install)
    if not found.software and found.tag != ours.tag:
        detail = f"{path} is {found.tag}, this daemon's packages are for {ours.tag}"
        return HyperGPUError(Reason.WORKER_UNUSABLE, detail, fix=install)
    if needs_torch and not found.has_torch:
        detail = f"{path} has no torch"
        fix = f"{path} -m pip install torch torchvision; or --worker numpy"
        return HyperGPUError(Reason.WORKER_UNUSABLE, detail, fix=fix)
    return None


def make_environment(folder: Path, arguments: Sequence[str]) -> Path:
    """Python of an environment with torch, which is made unless it is there. Blocks.

    One that was not finished, is of another Python, or has another build of torch than is wanted
    now, is made again.

    Raises:
        HyperGPUError: WORKER_UNUSABLE, it cannot be made, with what was said.
    """
    python, marker_file = folder / "bin" / "python", folder / "installed"
    recipe = " ".join([str(sys.implementation.cache_tag), *arguments])
    if python.exists() and marker_file.exists() and marker_file.read_text("utf-8") == recipe:
        return python
    log.info("the worker's Python is made: torch takes minutes to install", folder=str(folder))
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], "install python3-venv (Debian, Ubuntu)")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off"]
    _run([*pip, *arguments], "see that pip reaches its index and the disk has 8 GB free")
    write_durably(marker_file, recipe.encode())
    return python


def _run(command: Sequence[str], fix: str) -> None:
    """Run a step to its end; what it prints goes to stderr, what it said last into the error."""
    process = subprocess.run(
        command, env=public_environment(), capture_output=True, text=True, check=False
    )
    if process.returncode:
        last_line = (
            process.stderr.strip() or process.stdout.strip() or "it says nothing"
        ).splitlines()[-1]
        detail = f"no environment for the worker: {' '.join(command[:4])}: {last_line}"[:400]
        fix = f"{fix}; or name a Python with torch: --worker-python PATH; or --worker numpy"
        raise HyperGPUError(Reason.WORKER_UNUSABLE, detail, fix=fix)


def _machine_arguments(gpu: str) -> tuple[str, ...]:
    """What pip installs for the GPUs that the owner lets the worker use."""
    figures = [] if gpu == "none" else gpu_figures("compute_cap", gpu)
    capabilities = [f"sm_{each.replace('.', '')}" for each in figures]
    has_nvidia = gpu != "none" and Path("/dev/nvidiactl").exists()
    return torch_arguments(capabilities, has_nvidia=has_nvidia, platform=sys.platform)


def _own_folders() -> tuple[str, ...]:
    """Where this process finds our code and the packages that it needs."""
    packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return tuple(dict.fromkeys([str(Path(__file__).parents[3]), *packages]))
