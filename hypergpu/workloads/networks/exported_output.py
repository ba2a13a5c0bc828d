"""`python -m hypergpu.workloads.networks.exported_output EXPORT EXAMPLES FOLDER [OUTPUT]` writes
one output of a trained program as a program that takes no targets, for predictions.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn

from hypergpu.programs.checks import read_program
from hypergpu.programs.container import Program, ProgramError, value_numbers
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.networks.exported_program import ExportedProgram
from hypergpu.workloads.networks.forward_program import forward_program

_MODEL_NAME = "model.safetensors"


class ProgramOutput(nn.Module):
    """What a trained program gives of a batch under one name.

    Args:
        export: What `hypergpu job export` wrote of a job of one's own model.
        name: The output's, or a metric's; empty: the first output.
        given_fields: Names of the fields that there are values of.

    Raises:
        DatasetError: The program has no such output, or it needs a field that is not given.
    """

    def __init__(self, export: Path, name: str, given_fields: Sequence[str]) -> None:
        super().__init__()
        program = read_program(export)
        self._exported = ExportedProgram(export, export / _MODEL_NAME)
        self.model = self._exported.model()
        self.output = name or _first_output(program)
        names = self._exported.value_names
        if self.output not in names:
            raise DatasetError(
                f"the program has no output {self.output!r}. Fix: name one of {', '.join(names)}"
            )
        self._place = 1 + names.index(self.output)
        self._all_fields = program.fields
        needed_names = needed_fields(program, self._place)
        missing_names = [each for each in needed_names if each not in given_fields]
        if missing_names:
            raise DatasetError(
                f"the output {self.output} needs the field {missing_names[0]!r}."
                f" Fix: give data with {', '.join(needed_names)}"
            )
        self.fields = tuple(needed_names)
        """Names of the fields that the module takes, in order."""

    def forward(self, *values: Tensor) -> Tensor:
        """The output of a batch; fields that it does not depend on are zeros."""
        given_values = dict(zip(self.fields, values, strict=True))
        fields = [
            given_values[each.name]
            if each.name in given_values
            else values[0].new_zeros(
                (values[0].shape[0], *each.shape), dtype=getattr(torch, each.dtype)
            )
            for each in self._all_fields
        ]
        return self._exported.batch_values(self.model, fields)[self._place]


def _first_output(program: Program) -> str:
    if program.output_names:
        return program.output_names[0]
    raise DatasetError(
        "the program names no output of a sample. Fix: return outputs in evaluation, see"
        " docs/workloads.md; or give the module itself: run.predict(data, module=model)"
    )


def needed_fields(program: Program, place: int) -> list[str]:
    """Names of the fields that an output of the evaluation depends on, in the program's order.

    Args:
        program: Checked.
        place: The output's place among those of the evaluation.
    """
    graph, first_result = program.evaluate, program.inputs_count
    open_numbers, seen_numbers = [graph.outputs[place]], {graph.outputs[place]}
    while open_numbers:
        number = open_numbers.pop()
        if number < first_result:
            continue
        call = graph.calls[number - first_result]
        for argument in (*call.arguments, *call.named.values()):
            new_numbers = {*value_numbers(argument)} - seen_numbers
            seen_numbers |= new_numbers
            open_numbers += new_numbers
    first_field = len(program.tensors)
    return [
        field.name
        for number, field in enumerate(program.fields, first_field)
        if number in seen_numbers
    ]


def write_output(export: Path, examples: Path, folder: Path, name: str) -> None:
    """Write the program of an output: ``program``, ``tensors``, and ``fields`` in their order.

    Args:
        export: See `ProgramOutput`.
        examples: Safetensors of a few rows, an array a field, with which both are compared.
        folder: Gets the files.
        name: See `ProgramOutput`.

    Raises:
        DatasetError: As `ProgramOutput`.
        ProgramError: It cannot be written as a program.
    """
    rows = load_file(examples)
    module = ProgramOutput(export, name, tuple(rows))
    program = forward_program(module, {field: rows[field] for field in module.fields})
    (folder / "program").write_bytes(program.program)
    (folder / "tensors").write_bytes(program.tensors)
    (folder / "fields").write_bytes(msgspec.json.encode(module.fields))


def main() -> int:
    """Write the files; gives the process's exit status."""
    if len(sys.argv) not in {4, 5}:
        sys.stderr.write("usage: exported_output EXPORT EXAMPLES FOLDER [OUTPUT]\n")
        return 2
    name = sys.argv[4] if len(sys.argv) > 4 else ""
    try:
        export, examples, folder = (Path(word) for word in sys.argv[1:4])
        write_output(export, examples, folder, name)
    except (DatasetError, ProgramError, SafetensorError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
