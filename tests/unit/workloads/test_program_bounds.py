"""A program's check bounds numbers, lists, results and memory before anything is computed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.ours.workloads.constructs import ROWS, class_loss
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from hypergpu.programs.checks import parse_program
from hypergpu.programs.container import PROGRAM_PATH, ProgramError
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.networks.memory_bound import AliveBytes
from hypergpu.workloads.networks.program import ProgramWorkload
from tests.program_folders import write_checked

Call = dict[str, Any]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder, to read only."""
    folder = tmp_path_factory.mktemp("plain")
    write_checked(folder, nn.Linear(8, 3), class_loss, ROWS)
    return folder


def call(operator: str, *arguments: Any, **named: Any) -> Call:
    """One call of a container."""
    return {"operator": operator, "arguments": [*arguments], "named": named}


def value(number: int) -> dict[str, int]:
    """A value by its number."""
    return {"value": number}


FIRST = 4
"""Number of the first result: two parameters and two fields come before."""


def with_calls(plain: Path, folder: Path, graph: str, calls: list[Call]) -> Path:
    """The job with calls before those of a graph."""
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    program = json.loads((plain / PROGRAM_PATH).read_bytes())

    def move(argument: Any) -> Any:
        if isinstance(argument, dict) and argument.get("value", 0) >= FIRST:
            return value(argument["value"] + len(calls))
        return [*map(move, argument)] if isinstance(argument, list) else argument

    own = program[graph]
    for each in own["calls"]:
        each["arguments"] = [move(one) for one in each.get("arguments", [])]
    own["calls"] = [*calls, *own["calls"]]
    own["outputs"] = [number + len(calls) * (number >= FIRST) for number in own["outputs"]]
    (folder / PROGRAM_PATH).write_text(json.dumps(program))
    return folder


SQUARINGS = [
    call("operator.mul", 2**62, 2**62),
    *(call("operator.mul", value(FIRST + n), value(FIRST + n)) for n in range(40)),
]
BYTES = {"dtype": {"dtype": "int8"}}


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (SQUARINGS, r"train, call 0 \(operator.mul\): its result is beyond 64 bits"),
        ([call("operator.mul", [1] * 4096, 60_000)], "takes numbers alone, and this is list"),
        ([call("operator.mul", "a", 3_000_000_000)], "takes numbers alone, and this is str"),
        ([call("operator.add", [1], [1])], "takes numbers alone"),
        ([call("operator.pow", 10, 10**9)], "exponent is beyond 64"),
        ([call("operator.floordiv", 1, 0)], "ZeroDivisionError"),
        ([call("operator.getitem", value(0), 0)], "takes a part of several results"),
        (
            [call("aten.zeros.default", [10**8], **BYTES), call("aten.split.Tensor", value(4), 1)],
            r"call 1 \(aten.split.Tensor\): it gives 100,000,000 results, more than 4,096",
        ),
        (
            [call("aten.zeros.default", [10**9], **BYTES), call("aten.unbind.int", value(4), 0)],
            r"it gives 1,000,000,000 results",
        ),
        ([call("aten.ones.default", [1 << 40])], "is too large"),
        (
            [
                *(call("aten.ones.default", [1 << 35]) for _ in range(64)),
                call("aten.cat.default", [value(FIRST + n) for n in range(64)]),
            ],
            r"the results until here take [\d,.]+ GiB, and this machine has",
        ),
    ],
)
def test_what_would_take_too_much_is_refused_with_its_call(
    plain: Path, tmp_path: Path, calls: list[Call], said: str
) -> None:
    folder = with_calls(plain, tmp_path, "train", calls)
    with pytest.raises(DatasetError, match=said):
        ProgramWorkload(folder)


def test_a_call_that_fails_with_some_batches_is_told_with_its_place(
    plain: Path, tmp_path: Path
) -> None:
    calls = [
        call("aten.sym_size.int", value(2), 0),
        call("operator.sub", value(FIRST), 7),
        call("operator.floordiv", 1, value(FIRST + 1)),
    ]
    workload = ProgramWorkload(with_calls(plain, tmp_path, "evaluate", calls))
    fields = [torch.from_numpy(np.array(each[:7])) for each in ROWS.values()]
    with pytest.raises(ProgramError, match=r"evaluate, call 2 \(operator.floordiv\): ZeroDiv"):
        workload.evaluate(workload.model().eval(), *fields)


def test_containers_of_millions_of_values_are_refused_before_they_are_decoded(
    plain: Path,
) -> None:
    content = (plain / PROGRAM_PATH).read_bytes()
    wide = content.replace(b'"arguments":[', b'"arguments":[[' + b"[]," * 5_000_000 + b"[]],", 1)
    with pytest.raises(ProgramError, match="more than 4,000,000 values"):
        parse_program(wide)


def test_results_that_are_needed_no_more_do_not_count() -> None:
    alive = AliveBytes(most=5000)
    for _ in range(100):
        result = torch.empty(1000, device="meta")
        alive.add(result)
        alive.add(result.view(10, 100))
        alive.drop(result.view(10, 100))
        alive.drop(result)
    needed_tensor = torch.empty(1000, device="meta")
    alive.add(needed_tensor)
    with pytest.raises(ProgramError, match="and this machine has"):
        alive.add(torch.empty(1000, device="meta"))


GIB = 1 << 30


def cubic_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    size = batch["x"].shape[0]
    loss: torch.Tensor = class_loss(model, batch)
    return loss + torch.ones(size, size, size, size, size).mean() * 0


def test_an_evaluation_beyond_the_evaluators_memory_is_refused_before_it(tmp_path: Path) -> None:
    rows = {name: np.concatenate([each] * 8)[:64] for name, each in ROWS.items()}
    write_checked(tmp_path, nn.Linear(8, 3), cubic_loss, rows, batch_size=48)
    workload = ProgramWorkload(tmp_path)
    pattern = (
        r"evaluate, call \d+ \(aten.ones.default\): the results until here take 0.9 GiB, and this"
        r" process has 0\.\d GiB of memory, with a batch of 48\. Fix: a smaller batch_size"
    )
    with pytest.raises(DatasetError, match=pattern):
        workload.check_evaluation(GIB // 2)
    with pytest.raises(DatasetError, match="Fix: a smaller batch_size"):
        TorchEvaluator(workload, "", memory_bytes=GIB // 2)
    TorchEvaluator(workload, "")


def greedy_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    size = batch["x"].shape[0] * 10_000
    loss: torch.Tensor = class_loss(model, batch)
    return loss + torch.ones(size, size, size).mean() * 0


def test_a_loss_that_takes_more_memory_than_there_is_is_told_without_torchs_words(
    tmp_path: Path,
) -> None:
    pattern = r"takes more memory than there is \(.*test_program_bounds.py:\d+: "
    with pytest.raises(ProgramError, match=pattern) as failure:
        write_checked(tmp_path, nn.Linear(8, 3), greedy_loss, ROWS)
    assert "on a batch of" in str(failure.value)
    assert str(failure.value).endswith("Fix: a smaller batch_size")
    assert "llocat" not in str(failure.value)
