"""Why a model cannot be traced, in a sentence of our own: what, where, and one thing to write
instead.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hypergpu.programs.container import ProgramError
from hypergpu.workloads.networks.graph_calls import PendingCall
from hypergpu.workloads.networks.patching import replace_attribute
from hypergpu.workloads.networks.source_lines import CodeLine, called_line, raised_line, short

_OF_NUMBER = re.compile(r"(Eq|Ne)\((\d+, s\d+|s\d+, \d+)\)|s\d+ [<>]=? \d+|\d+ [<>]=? s\d+")
_FUNCTION_TRANSFORMS = (
    "_vmap",
    "_add_batch_dim",
    "_remove_batch_dim",
    "_jvp",
    "_grad",
    "_make_dual",
)
_INSTEAD = {
    "aten.unique_consecutive": "torch.unique",
    "aten.unique_dim": "torch.unique of one whole number for each row",
    "aten.bincount": "F.one_hot(x, classes).sum(0)",
    "aten.repeat_interleave": "x.repeat_interleave(count), with one number for all",
    "aten.as_strided": "x.unfold(dimension, size, step)",
    "aten.max_unpool2d": "F.interpolate(x, scale_factor=2)",
    "aten.tolist": "tensors in place of Python's numbers",
    "aten.combinations": "torch.cartesian_prod",
    "aten.equal": "(a == b).all()",
    "aten.allclose": "((a - b).abs() < 1e-5).all()",
}


class GuardLines:
    """Where a trace came to hold for some sizes of the batch alone."""

    def __init__(self) -> None:
        self._lines: list[tuple[str, CodeLine | None]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note them while a model is traced."""

        def note(environment: Any, prefix: str, guard: Any, **others: Any) -> None:
            self._lines.append((str(guard), called_line()))

        with replace_attribute(ShapeEnv, "_log_guard", note):
            yield

    def decisive(self) -> CodeLine | None:
        """The first line that compares the size with a number; else the last that bounds it."""
        numbers = [line for guard, line in self._lines if line and _OF_NUMBER.fullmatch(guard)]
        return next((line for line in numbers), None) or next(
            (line for _, line in reversed(self._lines) if line), None
        )


def operator_refusal(call: PendingCall, subject: str = "the model") -> ProgramError:
    """The refusal of a call that no program may make.

    Args:
        call: The call.
        subject: Who makes it.
    """
    name = call.operator
    if name.startswith(_FUNCTION_TRANSFORMS) or "nesting" in name or name.startswith("lazy_load"):
        return ProgramError(
            f"torch.func transforms such as vmap are no operators of a program{call.place()}."
            " Fix: write it over the whole batch"
        )
    base = name.rpartition(".")[0]
    instead = _INSTEAD.get(base)
    fix = f"write {instead}" if instead else "write it with other operators of torch"
    return ProgramError(f"{subject} calls {name}, which no program may{call.place()}. Fix: {fix}")


def explain_failure(
    error: Exception, line: CodeLine | None = None, subject: str = "the model"
) -> ProgramError:
    """A failed trace's cause, the user's line and what to do.

    Args:
        error: What torch.export raised.
        line: The user's, where it is known; None: that of the error.
        subject: What was traced.
    """
    program_error = next((each for each in _causes(error) if isinstance(each, ProgramError)), None)
    if program_error is not None:
        return program_error
    text = f"{error}"
    line = line or raised_line(error)
    place = f" ({line})" if line else ""
    kind = type(error).__name__
    if is_about_size(error, "batch"):
        return ProgramError(
            f"the model or loss fixes the size of the batch{place}."
            " Fix: compute over the whole batch, with x.shape[0] for its size"
        )
    if "ata-dependent" in text or "DataDependent" in kind:
        return ProgramError(f"Python decides by a tensor's values{place}. Fix: write torch.where")
    if ".numpy()" in text or ("numpy" in text.lower() and "subclass" in text):
        return ProgramError(f"a tensor leaves torch for numpy{place}. Fix: compute it with torch")
    return ProgramError(
        f"{subject} cannot be traced{place}: {kind}: {short(text or kind)}."
        " Fix: compute with torch's operators on tensors only"
    )


def is_about_size(error: Exception, dimension: str) -> bool:
    """Whether a trace failed since it holds for some sizes of a dimension alone."""
    text = str(error)
    return dimension in text and ("specialized" in text or "onstraint" in text)


def _causes(error: BaseException | None) -> list[BaseException]:
    causes: list[BaseException] = []
    while error is not None and len(causes) < 16:
        causes.append(error)
        error = error.__cause__ or error.__context__
    return causes
