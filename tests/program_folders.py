"""Folders of jobs with a program of one's own, as `hypergpu.train` writes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from hypergpu.programs.samples import SampleWriter
from hypergpu.workloads.networks.checked_program import UserCode, write_checked_program
from hypergpu.workloads.networks.tracing import BatchShape, TracedProgram

Arrays = Mapping[str, np.ndarray[Any, Any]]


def write_samples(folder: Path, arrays: Arrays) -> None:
    """The samples of a job, the same for training and evaluation."""
    writer = SampleWriter(folder)
    writer.write_part("train", [arrays])
    writer.write_part("held_out", [arrays])
    writer.close()


def write_checked(
    folder: Path,
    model: nn.Module,
    loss: Any,
    arrays: Arrays,
    batch_size: int = 9,
    evaluate_all: Any = None,
) -> TracedProgram:
    """A job's folder with a program that was compared with its model."""
    write_samples(folder, arrays)
    shape = BatchShape(tuple(arrays), is_tuple=False)
    code = UserCode(model, loss, evaluate_all)
    return write_checked_program(folder, code, shape, batch_size=batch_size)
