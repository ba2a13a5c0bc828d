"""Compares a program's metrics of all samples with the function that they were traced of."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hypergpu.programs.container import ProgramError
from hypergpu.workloads.networks.differences import TOLERANCE, relative_difference
from hypergpu.workloads.networks.graph_runner import failed_call
from hypergpu.workloads.networks.program import ProgramWorkload
from hypergpu.workloads.networks.source_lines import short
from hypergpu.workloads.networks.tracing import TracedProgram
from hypergpu.workloads.networks.whole_set_tracing import (
    WHOLE_SET_GRAPH,
    EvaluateAllFunction,
    run_whole_set,
)


def check_whole_set(
    function: EvaluateAllFunction,
    outputs: Mapping[str, Tensor],
    traced: TracedProgram,
    workload: ProgramWorkload,
) -> None:
    """Compare a user's metrics over all samples with the program's, on one and on two batches.

    Args:
        function: The user's.
        outputs: Of a batch, as the module gives them.
        traced: The program, with the lines of its calls.
        workload: The same as the coordinator has it.

    Raises:
        ProgramError: They differ, or fail.
    """
    whole = traced.program.evaluate_all
    if whole is None:
        return
    for batches in (1, 2):
        parts = [[outputs[name] for name in whole.outputs]] * batches
        theirs = run_whole_set(
            function, {name: torch.cat([each] * batches) for name, each in outputs.items()}
        )
        try:
            values = workload.measure_all(parts)
        except RuntimeError as error:
            line = traced.lines.get(failed_call(error) or ("", 0)) or traced.line_of(
                WHOLE_SET_GRAPH
            )
            raise ProgramError(
                f"evaluate_all fails as a program where it does not in Python ({line}):"
                f" {short(str(error))}. Fix: write it with other operators of torch"
            ) from error
        for name, value in values.items():
            gap = relative_difference(theirs[name].double(), torch.tensor(value).double(), 0.0)
            if gap > TOLERANCE:
                raise ProgramError(
                    f"evaluate_all as a program computes otherwise than in Python"
                    f" ({traced.line_of(WHOLE_SET_GRAPH)}):"
                    f" {name} differs by {gap:.2g} of its value."
                    " Fix: compute it of its outputs alone, by torch's operators"
                )
