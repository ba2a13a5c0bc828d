"""Merges what a job fine-tuned into its base, in a process of its own: it needs torch."""

import subprocess
import sys
import tempfile
from pathlib import Path

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.training.bases import link_base

_MERGE = "hypergpu.workloads.finetuning.export"


def merge_export(export: Path, base: Path) -> Path:
    """Write the whole model of an export, and give its folder.

    Args:
        export: What `hypergpu job export` wrote of a fine-tuning.
        base: Folder of the model that the job fine-tunes.

    Raises:
        HyperGPUError: FILE_UNUSABLE, they do not go together.
    """
    with tempfile.TemporaryDirectory(prefix="hypergpu-merge-") as job_folder:
        link_base(base, Path(job_folder))
        command = [sys.executable, "-m", _MERGE, str(export), job_folder]
        process = subprocess.run(command, check=False, capture_output=True, text=True)
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        detail = f"the adapter cannot be merged: {last_line.removeprefix('error: ')}"
        fix = "give the base that the job fine-tunes: --base FOLDER"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
    return export / "merged"
