"""Further forms of an export: what they need is said before anything is fetched."""

from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.user.cli.job_export import ExportOptions


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (ExportOptions(gguf_type="q2"), "q2 is none of f32, f16, bf16, q8_0"),
        (ExportOptions(gguf=True), "needs the base"),
        (ExportOptions(onnx=True), "on samples of the job"),
    ],
)
def test_a_form_that_cannot_be_written_is_refused_first(
    options: ExportOptions, reason: str
) -> None:
    with pytest.raises(HyperGPUError, match=reason):
        options.check()


def test_forms_with_what_they_need_are_taken() -> None:
    ExportOptions(gguf=True, gguf_type="q8_0", onnx=True, data=Path("data")).check()
    ExportOptions().check()
