"""From a validated job file to a job: the data first, then the job."""

from pathlib import Path

from hypergpu.client.calls import Coordinator
from hypergpu.client.upload import Advance, listed_files, manifest, named_files, upload
from hypergpu.jobfile import data_folder, spec_json
from hypergpu.jobfile.spec import JobSpec
from hypergpu.terminal.transfer import Shown, transfer


def submit_file(coordinator: Coordinator, spec: JobSpec, beside: Path) -> str:
    """Create the job; returns its id.

    Args:
        coordinator: Where to.
        spec: The job's settings. A relative ``data.path`` starts at ``beside``.
        beside: The job file's folder.

    Raises:
        HyperGPUError: The data cannot be read or sent, or the coordinator refuses the job.
    """
    if not spec.data.path:
        return coordinator.create_job(spec_json(spec), None)
    folder = data_folder(spec, beside)
    files = listed_files(folder)
    total = sum(path.stat().st_size for path in files)
    with transfer(f"reading {folder.name}") as report:
        named = named_files(folder, files, _counted(report, total))
    listing = manifest(named)
    with transfer(f"uploading {folder.name}") as report:
        upload(coordinator, named, _counted(report, total))
    return coordinator.create_job(spec_json(spec), listing)


def _counted(report: Shown, total: int) -> Advance:
    """Sums for a display that takes levels."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(done, total)

    return advance
