"""Lays out what an evaluator sees: links to its job's model and data, and a folder of its own.

The folders are always the same ones, since a sandbox shows folders that it was started with. What
the evaluator writes is copied to where it cannot write.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.shell.evaluator.process import EvaluatorRequest, Initialise, TryUpdate
from coordinator.shell.store.blobs.store import open_locked
from hypergpu.errors import HyperGPUError, Reason

_DATA = "data"


class SeatFolders(NamedTuple):
    """The folders of one evaluator."""

    root: Path

    @property
    def inputs(self) -> Path:
        """Model and data, which the evaluator reads."""
        return self.root / "inputs"

    @property
    def work(self) -> Path:
        """The evaluator's home, and all that it writes."""
        return self.root / "work"

    def make(self) -> None:
        """Make them, empty. Blocks."""
        self.remove()
        for folder in (self.inputs, self.work):
            folder.mkdir(parents=True, mode=0o700)

    def remove(self) -> None:
        """Remove them with all that is in them. Blocks."""
        shutil.rmtree(self.root, ignore_errors=True)


@contextmanager
def staged_request(folders: SeatFolders, request: EvaluatorRequest) -> Iterator[EvaluatorRequest]:
    """The request with its files where the evaluator sees them, as long as the block lasts. Blocks.

    No file of it is written over meanwhile; the data stay for the next request of the job.

    Raises:
        HyperGPUError: NOT_READY, a file is gone.
        OSError: The disk fails.
    """
    request = replace(request, data_dir=_staged_data(folders, request.data_dir))
    if isinstance(request, Initialise):
        paths = {"model_path": folders.work / "model", "layout_path": folders.work / "layout"}
        request = replace(request, **{name: str(path) for name, path in paths.items()})
        field, source = "weights_path", request.weights_path
    else:
        field, source = "model_path", request.model_path
    sources = {field: source} if source else {}
    if isinstance(request, TryUpdate):
        sources["update_path"] = request.update_path
    with ExitStack() as stack:
        links = {
            name: str(stack.enter_context(_staged_file(folders, path)))
            for name, path in sources.items()
        }
        yield replace(request, **links)


@contextmanager
def _staged_file(folders: SeatFolders, source: str) -> Iterator[Path]:
    file = open_locked(Path(source))
    if file is None:
        raise HyperGPUError(Reason.NOT_READY, f"the file {Path(source).name} is gone")
    link = folders.inputs / Path(source).name
    with file:
        try:
            _link_file(source, link)
            yield link
        finally:
            link.unlink(missing_ok=True)


def take_outputs(folders: SeatFolders, request: EvaluatorRequest) -> None:
    """Copy what the evaluator wrote to the paths that the request names. Blocks.

    A copy: a process that still has the file open cannot change what became a model.

    Raises:
        HyperGPUError: NOT_READY, it wrote no file.
        OSError: The disk fails.
    """
    if not isinstance(request, Initialise):
        return
    for name, target in (("model", request.model_path), ("layout", request.layout_path)):
        output_path = folders.work / name
        if output_path.is_symlink() or not output_path.is_file():
            raise HyperGPUError(Reason.NOT_READY, f"the evaluator wrote no {name}")
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(output_path, target, follow_symlinks=False)
        _sync(Path(target))
        output_path.unlink()


def _staged_data(folders: SeatFolders, data_dir: str) -> str:
    if not data_dir:
        return ""
    # Named as it is there: an error may speak of the folder.
    staged_folder = folders.inputs / _DATA / Path(data_dir).name
    if not staged_folder.is_dir():
        partial_folder = staged_folder.with_name(f"{staged_folder.name}.making")
        shutil.rmtree(partial_folder, ignore_errors=True)
        shutil.copytree(data_dir, partial_folder, copy_function=_link_file)
        partial_folder.rename(staged_folder)
    return str(staged_folder)


def _link_file(source: str, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
