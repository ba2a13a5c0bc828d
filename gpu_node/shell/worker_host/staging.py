"""Lays out what the worker sees: the folder of one job, and links to its model and its data.

A worker process serves one job; for another job a fresh process is started. The open job's files
lie in a folder that is always the same, since a sandbox shows folders that it was started with, and
a worker cannot put a link in its place.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from gpu_node.shell.folder.state import StatePaths, remove_entry
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId


class Stage:
    """The folders that the worker sees. All methods block; none may run beside another.

    Args:
        paths: The node's folder.
        clean: Names homes of workers that have seen no job.
    """

    def __init__(self, paths: StatePaths, clean: Callable[[], tuple[str, ...]] = tuple) -> None:
        self._paths = paths
        self._clean = clean
        self._added_names: frozenset[str] = frozenset()
        """Blobs that were added to those of the work at hand."""

    @property
    def job_id(self) -> JobId | None:
        """The job whose folder is open."""
        return self._paths.opened

    def clear(self) -> None:
        """Close the open job's folder, also one of a daemon that was killed; keep no inputs."""
        open_name = self._paths.opened or self._stored_name()
        self._paths.opened = None
        if open_name is not None:
            self._move(self._paths.open_folder, self._paths.job(open_name))
        clean = self._clean()
        for folder in self._paths.of_worker:
            if str(folder) in clean:
                continue  # Its sandbox has bound what lies there.
            for leftover in folder.iterdir():
                remove_entry(leftover)
        self._paths.open_name.unlink(missing_ok=True)

    def open_job(self, job_id: JobId) -> None:
        """Open a job's folder. No worker of another job may run any more."""
        if job_id == self._paths.opened:
            return
        source = self._paths.job(job_id)
        if self._paths.opened is not None:
            self.clear()
        # Whatever ends this daemon from here on, the next one knows whose the files are.
        write_durably(self._paths.open_name, job_id.encode())
        self._move(source, self._paths.open_folder)
        self._paths.opened = job_id

    def model(self, model: Path) -> Path:
        """The model as the worker sees it, in place of the model before."""
        for before in self._paths.inputs.glob("model-*"):
            before.unlink()
        link = self._paths.inputs / f"model-{model.name}"
        os.link(model, link)
        return link

    def dataset(self, dataset: Path | None) -> Path | None:
        """The data as the worker sees them."""
        if dataset is None:
            return None
        laid_out = self._paths.inputs / dataset.name
        if not laid_out.exists():
            partial_folder = laid_out.with_suffix(".making")
            shutil.rmtree(partial_folder, ignore_errors=True)
            shutil.copytree(dataset, partial_folder, copy_function=os.link)
            partial_folder.replace(laid_out)
        return laid_out

    def blobs(self, blobs: Iterable[Path]) -> Path:
        """Folder in which the worker sees these blobs, by their names, in place of those before."""
        folder = self._paths.inputs / "blobs"
        folder.mkdir(exist_ok=True, mode=0o700)
        paths = {path.name: path for path in blobs}
        for before in folder.iterdir():
            if before.name not in paths:
                remove_entry(before)
        for name, path in paths.items():
            if not (folder / name).exists():
                os.link(path, folder / name)
        self._added_names = frozenset()
        return folder

    def add_blobs(self, blobs: Iterable[Path]) -> None:
        """Let the worker see further blobs, in place of those that were added before."""
        folder = self._paths.inputs / "blobs"
        paths = {path.name: path for path in blobs}
        for name in self._added_names - paths.keys():
            (folder / name).unlink(missing_ok=True)
        new_names = {name for name in paths if not (folder / name).exists()}
        for name in new_names:
            os.link(paths[name], folder / name)
        self._added_names = (self._added_names & paths.keys()) | new_names

    @property
    def first_model(self) -> Path:
        """Path to which the worker writes the open job's first model."""
        return self._paths.open_folder / "first"

    def _stored_name(self) -> JobId | None:
        try:
            return JobId(self._paths.open_name.read_text("utf-8"))
        except (OSError, UnicodeDecodeError):
            return None

    def _move(self, source: Path, target: Path) -> None:
        """Move the files of a folder into another; links and folders are none of ours."""
        entries = list(source.iterdir()) if source.exists() else []
        if entries:
            target.mkdir(exist_ok=True, mode=0o700)
        for path in entries:
            if path.is_file() and not path.is_symlink():
                path.replace(target / path.name)
            else:
                remove_entry(path)
        if source != self._paths.open_folder:
            shutil.rmtree(source, ignore_errors=True)


def take_file(made: Path, to: Path) -> None:
    """Copy a file that the worker wrote to where it cannot write.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is no file.
        OSError: It cannot be read or written.
    """
    if made.is_symlink() or not made.is_file():
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{made} is no file")
    shutil.copyfile(made, to, follow_symlinks=False)
