"""Layouts of jobs' models, kept beside each job and, for takeovers, as blobs."""

from pathlib import Path

from coordinator.shell.store.blobs.store import BlobStore
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError
from hypergpu.ids import Digest
from hypergpu.tensors.layout import Layout, LayoutError, layout_from_json

_LAYOUT_SUFFIX = ".layout.json"


def save_layout(job_dir: Path, layout: Layout) -> None:
    """Write a job's layout durably, named by its digest, replacing any other."""
    job_dir.mkdir(parents=True, exist_ok=True)
    target = job_dir / f"{layout.digest}{_LAYOUT_SUFFIX}"
    write_durably(target, layout.to_json())
    for other in job_dir.glob(f"*{_LAYOUT_SUFFIX}"):
        if other != target:
            other.unlink()


def stored_layout(job_dir: Path) -> Layout | None:
    """Read a job's layout back; None when it is missing or damaged."""
    for path in job_dir.glob(f"*{_LAYOUT_SUFFIX}"):
        try:
            layout = layout_from_json(path.read_bytes())
        except (OSError, LayoutError):
            continue
        if path.name == f"{layout.digest}{_LAYOUT_SUFFIX}":
            return layout
    return None


def layout_from_blob(blobs: BlobStore, digest: Digest) -> Layout | None:
    """A layout that is a blob; None: it is not."""
    try:
        return layout_from_json(blobs.path(digest).read_bytes())
    except (HyperGPUError, OSError, LayoutError):
        return None
