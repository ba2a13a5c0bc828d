"""The guest's file system, written by hand: the same files give the same bytes."""

import lzma
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from py_compile import compile as compile_module

import netsim.reference.guest_program as program
from netsim.reference.guest import MODULES, PROGRAM, TOOLS
from netsim.refusal import RefusedError

FOLDERS = ("bin", "dev", "modules", "proc", "run", "sys", "tmp", "usr", "usr/sbin", "usr/lib/tc")
DISTRIBUTION = "normal.dist"
DISTRIBUTIONS = ("/usr/lib/tc", "/usr/lib/x86_64-linux-gnu/tc", "/usr/share/tc", "/lib/tc")
# Asks an interpreter as bare as the guest's which files it opened for the program's imports.
IMPORTS = (
    "import select, socket, struct, sys, time, pathlib, encodings.ascii, encodings.idna\n"
    "files = {getattr(module, '__file__', None) for module in list(sys.modules.values())}\n"
    "print(*sorted(files - {None}), sep='\\n')"
)
S_FILE, S_FOLDER = 0o100755, 0o040755


def build(kernel: Path, init: str) -> bytes:
    """Return the archive.

    Args:
        kernel: Where the kernel's package was unpacked.
        init: The script that the guest runs.
    """
    files = dict(_everything(kernel))
    files["/init"] = init.encode()
    folders = {str(parent) for path in files for parent in Path(path).parents} - {"/"}
    folders |= {f"/{name}" for name in FOLDERS}
    entries = [_entry(folder, S_FOLDER, b"") for folder in sorted(folders)]
    entries += [_entry(path, S_FILE, content) for path, content in sorted(files.items())]
    return b"".join(entries) + _entry("/TRAILER!!!", 0, b"")


def python_path() -> str:
    """Return the interpreter's path, here and in the guest."""
    return str(Path(sys.executable).resolve())


def _everything(kernel: Path) -> Iterator[tuple[str, bytes]]:
    yield from _modules(kernel)
    yield PROGRAM, Path(program.__file__).read_bytes()
    busybox = _found("busybox", "install busybox-static (apt-get install busybox-static)")
    yield "/bin/busybox", busybox.read_bytes()
    for tool in TOOLS:
        path = _found(tool, "install iproute2 (apt-get install iproute2)")
        yield from _binary(path, f"/usr/sbin/{tool}")
    for folder in DISTRIBUTIONS:
        table = Path(folder, DISTRIBUTION)
        if table.exists():
            yield f"/usr/lib/tc/{DISTRIBUTION}", table.read_bytes()
            break
    yield from _interpreter()


def _modules(kernel: Path) -> Iterator[tuple[str, bytes]]:
    for name in MODULES:
        for path in kernel.rglob(f"{name}.ko*"):
            content = path.read_bytes()
            is_packed = path.suffix == ".xz"
            yield f"/modules/{name}.ko", lzma.decompress(content) if is_packed else content


def _interpreter() -> Iterator[tuple[str, bytes]]:
    executable = Path(python_path())
    yield from _binary(executable, str(executable))
    argv = [str(executable), "-S", "-E", "-s", "-c", IMPORTS]
    listed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    for name in listed:
        path = Path(name)
        if path.suffix == ".so":
            yield from _binary(path, name)
        else:
            yield name, path.read_bytes()
            yield _compiled(path)


def _compiled(path: Path) -> tuple[str, bytes]:
    """Compile a module here: in the guest this would take seconds."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "compiled")
        mode = PycInvalidationMode.UNCHECKED_HASH
        compile_module(str(path), str(target), doraise=True, invalidation_mode=mode)
        name = f"{path.stem}.{sys.implementation.cache_tag}.pyc"
        return str(path.parent / "__pycache__" / name), target.read_bytes()


def _binary(path: Path, target: str) -> Iterator[tuple[str, bytes]]:
    yield target, path.read_bytes()
    # `ldd` fails on what needs no library.
    listed = subprocess.run(["ldd", str(path)], check=False, capture_output=True, text=True).stdout
    for word in listed.split():
        if word.startswith("/") and Path(word).exists():
            yield word, Path(word).read_bytes()


def _found(name: str, fix: str) -> Path:
    for folder in ("/bin", "/sbin", "/usr/bin", "/usr/sbin"):
        path = Path(folder, name)
        if path.exists():
            return path
    raise RefusedError(f"the program {name} was not found", fix)


def _entry(path: str, mode: int, content: bytes) -> bytes:
    """Write one file as cpio's ``newc`` has it; all times are zero and all owners root."""
    name = path.lstrip("/").encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    return _padded(header + name) + _padded(content)


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 4)
