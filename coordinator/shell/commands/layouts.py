"""A job's layout on disk, named by its digest: a damaged one is missing, and made again."""

from pathlib import Path

from hypergpu.files import write_durably
from hypergpu.tensors.layout import Layout, LayoutError, layout_from_json

_SUFFIX = ".layout.json"


def save_layout(job_dir: Path, layout: Layout) -> None:
    """Write it durably, replacing any other."""
    job_dir.mkdir(parents=True, exist_ok=True)
    target = job_dir / f"{layout.digest}{_SUFFIX}"
    write_durably(target, layout.to_json())
    for other in job_dir.glob(f"*{_SUFFIX}"):
        if other != target:
            other.unlink()


def stored_layout(job_dir: Path) -> Layout | None:
    """Read it back; None when there is none or it is not what was written."""
    for path in job_dir.glob(f"*{_SUFFIX}"):
        try:
            layout = layout_from_json(path.read_bytes())
        except (OSError, LayoutError):
            continue
        if path.name == f"{layout.digest}{_SUFFIX}":
            return layout
    return None
