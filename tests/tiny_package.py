"""A package with a workload, whose version on disk can be raised while programs use it.

The training loss that it tells is its version, so that a job says which one trained it.
"""

import shutil
from pathlib import Path

NAME = "tiny"
PACKAGE = "tiny-workload"
_ENTRY = """
from hypergpu.workloads.entry import Option, WorkloadEntry

ENTRY = WorkloadEntry(
    name="tiny",
    version={version},
    kind="numpy",
    dataset="digits",
    meaning="Digits, with a loss of its version",
    builder="tiny_workload.training:build",
    options=(Option("fault", False, "Whether training fails"), Option("since_{version}", 0, "")),
)
"""
_TRAINING = """
from hypergpu.workloads.digits import DigitsSoftmax

# {padding}: a file of the same second and size would be taken for the compiled one.


class Tiny(DigitsSoftmax):
    def __init__(self, has_fault):
        self._has_fault = has_fault

    def gradient(self, parameters, inputs, targets):
        if self._has_fault:
            raise ValueError("the test broke it. Fix: leave options.fault out")
        _, gradients = super().gradient(parameters, inputs, targets)
        return float({version}), gradients


def build(options):
    return Tiny(options["fault"])
"""


def install(folder: Path, version: int) -> str:
    """Put the package into a folder, in place of an older version as an installer does.

    Returns:
        The path that Python then finds it on.
    """
    code = folder / "tiny_workload"
    code.mkdir(parents=True, exist_ok=True)
    (code / "entry.py").write_text(_ENTRY.format(version=version), "utf-8")
    padding = "x" * version
    training = _TRAINING.format(version=version, padding=padding)
    (code / "training.py").write_text(training, "utf-8")
    for older in folder.glob("tiny_workload-*.dist-info"):
        shutil.rmtree(older)
    about = folder / f"tiny_workload-{version}.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: {PACKAGE}\nVersion: {version}.0\n", "utf-8")
    points = f"[hypergpu.workloads]\n{NAME} = tiny_workload.entry:ENTRY\n"
    (about / "entry_points.txt").write_text(points, "utf-8")
    (about / "RECORD").write_text("", "utf-8")
    return f"{folder}:{Path(__file__).parent.parent}"
