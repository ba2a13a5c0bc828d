"""What people write in models: gradients of a program against its module's, or a refusal with the
user's line.
"""

import re
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.ours.table import PartFigures
from benchmarks.ours.workloads.constructs import Construct, constructs
from hypergpu.programs.container import ProgramError
from hypergpu.programs.samples import SampleWriter, read_samples
from hypergpu.workloads.networks.agreement import check_agreement
from hypergpu.workloads.networks.checked_program import UserCode, write_checked_program
from hypergpu.workloads.networks.module_under_test import ModuleUnderTest
from hypergpu.workloads.networks.program import ProgramWorkload
from hypergpu.workloads.networks.tracing import BatchShape

_LINE = re.compile(r"\(\S*\.py:\d+")
_QUICK_EVERY = 8


class ConstructResult(NamedTuple):
    """What became of one construct."""

    name: str
    is_equal: bool
    refusal: str
    """Empty: none."""
    is_expected: bool

    @property
    def has_line(self) -> bool:
        """Whether a refusal names the user's file and line."""
        return bool(_LINE.search(self.refusal))

    @property
    def row(self) -> list[str]:
        """Its row of the table."""
        if not self.refusal:
            return [self.name, "", "equal" if self.is_equal else "WRONG", "", ""]
        place = "refused with the line" if self.has_line else "refused WITHOUT A LINE"
        return [self.name, "", place, "", self.refusal]


def own_figures(*, is_quick: bool) -> PartFigures:
    """Every construct; in a quick run each eighth."""
    chosen_constructs = constructs()[:: _QUICK_EVERY if is_quick else 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constructs use what torch calls old
        results = [measure_construct(each) for each in chosen_constructs]
    refusals = [each for each in results if each.refusal]
    metrics = {
        "constructs": float(len(results)),
        "constructs_equal": float(sum(each.is_equal for each in results)),
        "constructs_refused": float(len(refusals)),
        "constructs_wrong": float(sum(not each.is_expected for each in results)),
        "constructs_refused_without_line": float(sum(not each.has_line for each in refusals)),
    }
    notes = (
        "Loss, gradients, state after a step and evaluation, on 9 and on 24 samples, to 1e-4.",
        "Wrong: otherwise, or refused though a program can hold it.",
    )
    return PartFigures(rows=[each.row for each in results], metrics=metrics, notes=notes)


def measure_construct(construct: Construct) -> ConstructResult:
    """Write its program, and compare it with the module on two batches."""
    torch.manual_seed(1)
    shape = BatchShape(tuple(construct.arrays), is_tuple=False)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        writer = SampleWriter(folder)
        writer.write_part("train", [construct.arrays])
        writer.write_part("held_out", [construct.arrays])
        writer.close()
        model = construct.make()
        try:
            code = UserCode(model, construct.loss)
            traced_program = write_checked_program(folder, code, shape, batch_size=9)
        except ProgramError as error:
            return ConstructResult(
                construct.name,
                is_equal=False,
                refusal=str(error),
                is_expected=construct.is_refused,
            )
        samples = read_samples(folder).held_out
        whole = [torch.from_numpy(np.array(each)) for each in samples.batch(np.arange(24))]
        module = ModuleUnderTest(model, construct.loss, shape, whole)
        try:
            check_agreement(module, module.step(), traced_program, ProgramWorkload(folder))
        except ProgramError:
            return ConstructResult(construct.name, is_equal=False, refusal="", is_expected=False)
    is_expected = not construct.is_refused
    return ConstructResult(construct.name, is_equal=True, refusal="", is_expected=is_expected)
