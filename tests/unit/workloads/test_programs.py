"""Programs: traced models do what the models do, and what may not run is refused."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from hypergpu.programs.checks import parse_program
from hypergpu.programs.container import (
    PROGRAM_PATH,
    TENSORS_PATH,
    VERSION,
    Field,
    Program,
    ProgramError,
    program_bytes,
)
from hypergpu.programs.samples import INDEX_PATH, SampleWriter
from hypergpu.workloads.built_in import BUILT_IN
from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.networks.graph_runner import lacking_operators
from hypergpu.workloads.networks.program import ProgramModule, ProgramWorkload
from hypergpu.workloads.networks.tracing import BatchShape, Loss, TracedProgram, trace
from hypergpu.workloads.registry import build_for_job, find
from tests.tiny_bases import tiny_config

Arrays = Mapping[str, np.ndarray[Any, Any]]
DRAWS = np.random.default_rng(0)
IMAGES: Arrays = {
    "x": DRAWS.random((20, 64), np.float32),
    "y": DRAWS.integers(0, 10, 20),
}
TEXTS: Arrays = {"x": DRAWS.integers(0, 50, (20, 12))}


class Convolutions(nn.Module):
    """Statistics, counters and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden_state = F.relu(self.norm(self.convolution(x.view(-1, 1, 8, 8))))
        logits: Tensor = self.last(F.dropout(hidden_state, 0.2, self.training).flatten(1))
        return logits


class TiedTransformer(nn.Module):
    """Tied weights, a table that is no state, masks, and a part without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.places: Tensor
        self.register_buffer("places", torch.arange(100), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            places = self.places[: x.shape[1]].float().cos()
        hidden_state = self.embedding(x) + places[None, :, None]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        logits: Tensor = self.head(self.layer(hidden_state, src_mask=mask))
        return logits


class FrozenBase(nn.Module):
    """A frozen layer with a small one beside it, as adapters are."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 10).requires_grad_(False)
        self.adapter = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.base(x) + self.adapter(x)
        return logits


def images_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["x"])
    hits = (logits.argmax(1) == batch["y"]).float().mean()
    return F.cross_entropy(logits, batch["y"]), {"accuracy": hits}


def text_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    x = batch["x"]
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def model_with_adapter(kind: str) -> nn.Module:
    """A model of transformers with PEFT's LoRA in all linear layers."""
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_config(tiny_config(kind, 50))
    adapter = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return cast(nn.Module, get_peft_model(model, adapter))


def adapted_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    x = batch["x"]
    logits = model(input_ids=x, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


CASES = [
    (partial(model_with_adapter, "llama"), adapted_loss, TEXTS),
    (partial(model_with_adapter, "gpt2"), adapted_loss, TEXTS),
    (Convolutions, images_loss, IMAGES),
    (TiedTransformer, text_loss, TEXTS),
    (FrozenBase, images_loss, IMAGES),
]
# Some processors sum the gradients of keys that queries share in another order in a program.
TOLERANCES = (1e-6, 0.0, 0.0, 0.0, 0.0)


def write_folder(folder: Path, model: nn.Module, loss: Loss, arrays: Arrays) -> TracedProgram:
    """The data folder of a job."""
    writer = SampleWriter(folder)
    fields = writer.write_part("train", [arrays])
    writer.write_part("held_out", [arrays])
    writer.close()
    traced_program = trace(model, loss, BatchShape(tuple(arrays), is_tuple=False), fields)
    traced_program.write(folder)
    return traced_program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's folder, to read only."""
    job_folder = tmp_path_factory.mktemp("program")
    write_folder(job_folder, Convolutions(), images_loss, IMAGES)
    return job_folder


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of a module's trained parameters."""
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads it
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize(("case", "tolerance"), [*zip(CASES, TOLERANCES, strict=True)])
def test_a_program_trains_like_its_model(
    case: tuple[Callable[[], nn.Module], Loss, Arrays], tolerance: float, tmp_path: Path
) -> None:
    make, loss, arrays = case
    torch.manual_seed(1)
    model = make()
    write_folder(tmp_path, model, loss, arrays)
    workload = ProgramWorkload(tmp_path)
    copy = workload.model().train()
    fields = tuple(map(torch.from_numpy, workload.load("").train.batch(np.arange(20))))
    torch.manual_seed(2)
    workload.loss(copy, *fields).backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(2)
    measures = loss(model.train(), dict(zip(arrays, fields, strict=True)))
    (measures[0] if isinstance(measures, tuple) else measures).backward()
    gradients, expected_gradients = gradients_of(copy), gradients_of(model)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=tolerance, atol=tolerance)
    state = copy.state_dict()
    for name, buffer in model.named_buffers():
        assert name not in state or torch.equal(buffer, state[name])
    with torch.no_grad():
        measures = loss(model.eval(), dict(zip(arrays, fields, strict=True)))
        sums = workload.evaluate(copy.eval(), *fields)
        alone = workload.evaluate(copy, *(each[:1] for each in fields))
    parts = measures if isinstance(measures, tuple) else (measures, {"loss": measures})
    ((metric, value),) = parts[1].items()
    assert workload.metric == metric
    # torch evaluates a transformer's layers by other kernels than it trains them.
    assert sums[:3] == pytest.approx((float(parts[0]) * 20, float(value) * 20, 20))
    assert alone.samples == 1


def steps_apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Length of the difference of two gradients over the length of the second."""
    gaps = [one[name] - other[name] for name in other]
    lengths = [
        sum(float(each.square().sum()) for each in tensors) for tensors in (gaps, other.values())
    ]
    return float(np.sqrt(lengths[0] / lengths[1]))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
@pytest.mark.parametrize(("make", "loss", "arrays"), CASES)
def test_a_program_trains_like_its_model_under_autocast(
    tmp_path: Path, make: Callable[[], nn.Module], loss: Loss, arrays: Arrays
) -> None:
    torch.manual_seed(5)
    model = make().train()
    write_folder(tmp_path, model, loss, arrays)
    workload = build_for_job(find("program"), {}, str(tmp_path))
    twin = workload.model().train()
    fields = [torch.from_numpy(array[:6].copy()) for array in arrays.values()]
    batch = dict(zip(arrays, fields, strict=True))
    measures = []
    for trained_model in (model, twin):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            measure = workload.loss(twin, *fields) if trained_model is twin else loss(model, batch)
        value = measure[0] if isinstance(measure, tuple) else measure
        value.backward()
        measures.append((float(value.detach()), gradients_of(trained_model)))
    (eager_loss, eager), (own_loss, own) = measures
    assert own_loss == pytest.approx(eager_loss, rel=0.01)
    assert set(own) == set(eager)
    assert steps_apart(own, eager) < 0.02


def test_tracing_leaves_each_part_of_a_model_in_its_mode(tmp_path: Path) -> None:
    model = Convolutions().train()
    model.norm.eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    write_folder(tmp_path, model, images_loss, IMAGES)
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_frozen_and_tied_tensors_are_no_part_of_what_is_sent(tmp_path: Path) -> None:
    write_folder(tmp_path, FrozenBase(), images_loss, IMAGES)
    model = ProgramWorkload(tmp_path).model()
    assert [name for name, _ in model.named_parameters()] == ["adapter.weight", "adapter.bias"]
    assert set(model.state_dict()) == {"adapter.weight", "adapter.bias"}
    assert isinstance(model, ProgramModule)
    assert len(model.tensors()) == 4


def loss_by_value(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss, _ = images_loss(model, batch)
    return loss if float(loss) > 0 else -loss


def loss_of_four(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return images_loss(model, batch)[0] * batch["x"].view(4, 64).mean()


def loss_by_strides(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return images_loss(model, batch)[0] * batch["x"].as_strided((2, 2), (1, 1)).mean()


def loss_of_a_wrong_field(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return images_loss(model, batch)[0] * batch["z"].mean()


def loss_of_three_metrics(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    loss, metrics = images_loss(model, batch)
    first = model(batch["x"])[:, 0].exp().mean()
    return loss, {"top_1": metrics["accuracy"], "error": 1 - metrics["accuracy"], "first": first}


def loss_of_a_number(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    return images_loss(model, batch)[0], {"one": 1.0}


def test_metrics_are_measured_by_name_and_cost_training_nothing(tmp_path: Path) -> None:
    traced_program = write_folder(tmp_path, Convolutions(), loss_of_three_metrics, IMAGES)
    assert traced_program.program.metrics == ("top_1", "error", "first")
    assert not any(
        call.operator == "aten.exp.default" for call in traced_program.program.train.calls
    )
    workload = ProgramWorkload(tmp_path)
    assert workload.metric == "top_1"
    few = TorchEvaluator(workload, "").evaluate(TorchEvaluator(workload, "").initial(0))
    fields = {name: torch.from_numpy(array) for name, array in IMAGES.items()}
    model = Convolutions().eval()
    model.load_state_dict(workload.model().state_dict())
    with torch.no_grad():
        loss, expected_metrics = loss_of_three_metrics(model, fields)
    assert few.metric("loss") == pytest.approx(float(loss))
    for name, value in expected_metrics.items():
        assert few.metric(name) == pytest.approx(float(value), abs=1e-6)


@pytest.mark.parametrize(
    "names", [("loss",), ("Two words",), ("a", "a"), tuple("abcdefghijklmnopq")]
)
def test_metrics_that_could_not_be_shown_are_refused(folder: Path, names: tuple[str, ...]) -> None:
    program = parse_program((folder / PROGRAM_PATH).read_bytes())
    with pytest.raises(ProgramError, match="metric"):
        parse_program(program_bytes(msgspec.structs.replace(program, metrics=names)))


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (loss_of_a_number, "^the loss gives neither a tensor nor that and metrics, each a tensor"),
        (
            loss_by_value,
            "Python decides by a tensor's values .*test_programs.py:.*Fix: write torch.where$",
        ),
        (loss_of_four, r"fixes the size of the batch \(.*test_programs.py:.*view\(4, 64\)"),
        (loss_by_strides, r"as_strided.default, which no program may \(.*test_programs.py.*unfold"),
        (loss_of_a_wrong_field, r"no field 'z' \(.*test_programs.py:.*Fix: take one of x, y$"),
    ],
)
def test_what_cannot_be_traced_is_told_with_the_fix(loss: Loss, said: str) -> None:
    fields = (Field("x", (64,), "float32"), Field("y", (), "int64"))
    with pytest.raises(ProgramError, match=said):
        trace(Convolutions(), loss, BatchShape(("x", "y"), is_tuple=False), fields)


def test_models_that_nothing_trains_are_refused() -> None:
    for model, pattern in (
        (Convolutions().requires_grad_(False), "no parameter that requires a gradient"),
        (Convolutions().double(), "model.float()"),
    ):
        with pytest.raises(ProgramError, match=pattern):
            trace(model, images_loss, BatchShape((), is_tuple=False), ())


def change_first_call(program: Program, **changes: object) -> bytes:
    """The container of a program whose first call is another one."""
    call = msgspec.structs.replace(program.train.calls[0], **changes)
    train = msgspec.structs.replace(program.train, calls=(call, *program.train.calls[1:]))
    return program_bytes(msgspec.structs.replace(program, train=train))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"operator": "aten.from_file.default"}, "aten.from_file.default.*not allowed"),
        ({"operator": "aten.as_strided.default"}, "not allowed"),
        ({"operator": "operator.attrgetter"}, "not allowed"),
        ({"operator": "builtins.eval"}, "not allowed"),
        ({"arguments": ({"value": 10**6},)}, "no earlier value"),
        ({"arguments": ({"value": -1},)}, "no earlier value"),
        ({"arguments": ({"code": "x"},)}, "'code' is none of"),
        ({"arguments": ("__import__('os')",)}, "one short word"),
        ({"arguments": (2**70,)}, "beyond 64 bits"),
        ({"arguments": ([[[[1]]]],)}, r"got `array` - at `\$.train.calls\[0\]"),
        ({"arguments": ([0] * 5000,)}, "of length <= 4096"),
        ({"named": {"out.x": 1}}, "no name of an argument"),
    ],
)
def test_a_program_of_anything_else_is_refused_with_its_place(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    program = parse_program((folder / PROGRAM_PATH).read_bytes())
    with pytest.raises(ProgramError, match=said):
        parse_program(change_first_call(program, **changes))


def test_a_program_says_how_many_samples_are_evaluated_at_once(
    folder: Path, tmp_path: Path
) -> None:
    program = parse_program((folder / PROGRAM_PATH).read_bytes())
    with pytest.raises(ProgramError, match="evaluation_batch must be 1 to 65,536"):
        parse_program(program_bytes(msgspec.structs.replace(program, evaluation_batch=0)))
    shutil.copytree(folder, tmp_path / "job")
    few = msgspec.structs.replace(program, evaluation_batch=3)
    (tmp_path / "job" / PROGRAM_PATH).write_bytes(program_bytes(few))
    evaluator = TorchEvaluator(ProgramWorkload(tmp_path / "job"), "")
    model = evaluator.initial(0)
    usual = TorchEvaluator(ProgramWorkload(folder), "").evaluate(model)
    assert evaluator.evaluate(model)[:3] == pytest.approx(usual[:3])


def test_wrong_and_huge_results_are_found_before_anything_is_computed(
    folder: Path, tmp_path: Path
) -> None:
    program = parse_program((folder / PROGRAM_PATH).read_bytes())
    names = [f"data/{part}-0{number}.bin" for part in ("train", "held_out") for number in (0, 1)]
    for path in (TENSORS_PATH, INDEX_PATH, *names):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes((folder / path).read_bytes())
    wide = {"operator": "aten.zeros.default", "arguments": ([1 << 40],)}
    mixed_call = {"operator": "aten.mm.default", "arguments": ({"value": 0}, {"value": 1})}
    for changes, pattern in ((wide, "too large"), (mixed_call, r"call 0 \(aten.mm.default\)")):
        (tmp_path / PROGRAM_PATH).write_bytes(change_first_call(program, **changes))
        with pytest.raises(DatasetError, match=pattern):
            ProgramWorkload(tmp_path)


def test_no_spoilt_container_does_more_than_be_refused(folder: Path) -> None:
    content, draw = (folder / PROGRAM_PATH).read_bytes(), random.Random(7)
    tree = json.loads(content)
    refusals = 0
    for _ in range(3000):
        spoilt = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(spoilt))
            spoilt[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
        try:
            parse_program(bytes(spoilt))
        except ProgramError:
            refusals += 1
    for _ in range(3000):
        calls = json.loads(json.dumps(tree))["train"]["calls"]
        call = draw.choice(calls)
        call["arguments"] = [draw.choice([None, 1e308, [], {}, {"value": True}, "mean", -(2**63)])]
        spoilt = bytearray(
            json.dumps({**tree, "train": {**tree["train"], "calls": calls}}), "utf-8"
        )
        try:
            parse_program(bytes(spoilt))
        except ProgramError:
            refusals += 1
    assert refusals > 2000


def test_samples_that_are_not_what_the_index_says_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, FrozenBase(), images_loss, IMAGES)
    (tmp_path / "data" / "train-00.bin").write_bytes(b"short")
    with pytest.raises(DatasetError, match=r"train-00.bin has 5 bytes; 20 samples need 5120"):
        ProgramWorkload(tmp_path)


def test_a_workload_names_the_operators_that_its_program_calls(folder: Path) -> None:
    operators = ProgramWorkload(folder).operators
    assert {"aten.conv2d.default", "aten.dropout.default"} < set(operators)
    assert operators == tuple(sorted(set(operators)))
    assert lacking_operators() == ()


def test_the_workload_needs_its_jobs_folder(folder: Path) -> None:
    entry = find("program")
    assert entry in BUILT_IN
    assert entry.version == VERSION
    assert entry.exported_files == (PROGRAM_PATH, TENSORS_PATH)
    assert isinstance(build_for_job(entry, {}, str(folder)), ProgramWorkload)
    with pytest.raises(DatasetError, match="there are none"):
        build_for_job(entry, {}, "")


def test_the_container_is_checked_without_torch() -> None:
    program = (
        "import sys, hypergpu, hypergpu.programs.container, hypergpu.programs.samples;"
        "sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
