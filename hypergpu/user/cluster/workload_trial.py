"""A workload tried on this machine by the programs that jobs run it in: evaluator, worker and the
`load.py` of an export. Each is a process, as it is in a job.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import numpy as np
from safetensors.numpy import save_file

from hypergpu.assignment import Assignment, Lease, SampleRange, Task
from hypergpu.blobs import BlobRef
from hypergpu.command_line import program
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.frames import frame, read_frame
from hypergpu.ids import Digest, JobId, Slot
from hypergpu.privacy import public_environment
from hypergpu.tensors.codec import decode_parameters
from hypergpu.tensors.layout import Flat, Layout, layout_from_json, unpack
from hypergpu.units import Bytes, Samples
from hypergpu.workloads.entry import OPTIONS_FIELD, WORKLOAD_FIELD, Options, WorkloadEntry

BATCH = 8
_CODEC = "fp32"
_JOB = JobId("job-000000000000")
_GRADIENT_SAMPLES = 64
_SEED = 1


class TrialOrder(NamedTuple):
    """A workload to try, and the folder for the files of the trial."""

    entry: WorkloadEntry
    options: Options
    data_dir: str
    """The user's folder; empty for the workload's own data."""
    folder: Path


class TrialModel(NamedTuple):
    """A model that the evaluator made."""

    layout: Layout
    digest: str
    samples: int
    """Training samples that there are."""


class TrialScore(NamedTuple):
    """A model's figures on held-out samples."""

    loss: float
    metric: float
    metric_name: str


class StepTaken(NamedTuple):
    """One inner step of the worker."""

    samples: int
    loss: float
    took_s: float


class WorkloadTrial:
    """Steps of a trial, in their order. Each raises `HyperGPUError` with what its program said."""

    def __init__(self, order: TrialOrder, evaluator: "FramedProcess", worker: "FramedProcess"):
        self._order = order
        self._evaluator = evaluator
        self._worker = worker
        self._model_path = str(order.folder / "model")

    def make_model(self) -> TrialModel:
        """Read the data and make the first model, as the coordinator's evaluator does."""
        path = str(self._order.folder / "layout")
        answer = self._evaluate("Initialise", seed=_SEED, layout_path=path)
        layout = layout_from_json(answer["layout_json"])
        return TrialModel(layout, answer["digest"], sum(answer["partition_sizes"]))

    def draw_model(self) -> Digest:
        """Make the first model as nodes do; gives its digest."""
        path = self._order.folder / "drawn"
        reply = self._worker.ask(
            {
                "type": "WriteInitialModel",
                "number": 0,
                "workload": self._order.entry.name,
                "workload_version": self._order.entry.version,
                "options": self._order.options,
                "seed": _SEED,
                "data_dir": self._order.data_dir,
                "model_path": str(path),
            }
        )
        _require("InitialModelWritten", reply, "reason")
        return digest_of(path.read_bytes())

    def train(self, model: TrialModel) -> StepTaken:
        """Take an inner step as a node's worker does, and apply its update to the model."""
        count = Samples(min(BATCH, model.samples))
        task = Task(
            workload=self._order.entry.name,
            workload_version=self._order.entry.version,
            options=dict(self._order.options),
            inner_steps=1,
            batch_size=count,
            learning_rate=1e-3,
            codec=_CODEC,
            seed=_SEED,
            ranges=(SampleRange(0, count),),
            model=BlobRef(Digest(model.digest), Bytes(model.layout.model_bytes)),
            layout=model.layout.digest,
        )
        assignment = Assignment(lease=Lease(_JOB, 0, 1), slot=Slot(0), task=task)
        update = self._order.folder / "update"
        began_s = time.monotonic()
        reply = self._worker.ask(
            {
                "type": "TrainShard",
                "assignment": msgspec.to_builtins(assignment),
                "start": {},
                "model_path": self._model_path,
                "data_dir": self._order.data_dir,
                "state_dir": str(self._order.folder / "state"),
                "update_path": str(update),
            }
        )
        _require("ShardTrained", reply, "reason")
        took_s = time.monotonic() - began_s
        octets = np.fromfile(self._model_path, np.uint8)
        pseudo_gradient = decode_parameters(model.layout, _CODEC, update.read_bytes())
        Flat.view(model.layout, octets).parameters[:] -= pseudo_gradient
        octets.tofile(self._model_path)
        return StepTaken(count, float(reply["update"]["loss_first"] or 0.0), took_s)

    def evaluate(self, model: TrialModel) -> TrialScore:
        """Measure the model on the held-out samples."""
        answer = self._evaluate("Evaluate", layout_digest=model.layout.digest)
        return TrialScore(answer["loss"], answer["metric"], answer["metric_name"])

    def measure_gradient(self, model: TrialModel) -> None:
        """Differentiate the held-out loss, by which updates are weighed."""
        self._evaluate(
            "MeasureGradient",
            layout_digest=model.layout.digest,
            samples_most=_GRADIENT_SAMPLES,
            sketch_secret=bytes(32),
        )

    def export(self, model: TrialModel) -> str:
        """Export the model and run the `load.py` beside it; gives the line that this printed."""
        folder = self._order.folder / "export"
        folder.mkdir()
        flat = Flat.view(model.layout, np.fromfile(self._model_path, np.uint8))
        metadata = {
            WORKLOAD_FIELD: self._order.entry.name,
            OPTIONS_FIELD: msgspec.json.encode(self._order.options).decode(),
        }
        save_file(unpack(model.layout, flat), folder / "model.safetensors", metadata)
        loader = folder / "load.py"
        loader.write_bytes(files("hypergpu.user.client").joinpath("load.py.txt").read_bytes())
        folders = [self._order.data_dir] if self._order.data_dir else []
        process = subprocess.run(
            [sys.executable, str(loader), *folders],
            check=False,
            capture_output=True,
            text=True,
            env=public_environment(),
        )
        if process.returncode:
            last_line = process.stderr.strip().rpartition("\n")[2].removeprefix("error: ")
            raise _failure(last_line)
        return process.stdout.strip()

    def _evaluate(self, kind: str, **fields: object) -> dict[str, Any]:
        request = {
            "type": kind,
            "workload": self._order.entry.name,
            "options": self._order.options,
            "data_dir": self._order.data_dir,
            "model_path": self._model_path,
            **fields,
        }
        reply = self._evaluator.ask(request)
        if reply["type"] == "EvaluatorFailure":
            raise _failure(reply["detail"])
        return reply


@contextmanager
def open_trial(order: TrialOrder) -> Iterator[WorkloadTrial]:
    """Start evaluator and worker for a trial."""
    evaluator = program("coordinator.shell.evaluator")
    worker = program("gpu_node.shell.worker", "--kind", order.entry.kind)
    with (
        start_framed(evaluator, order.folder / "evaluator.log") as first,
        start_framed(worker, order.folder / "worker.log") as second,
    ):
        if second.read()["type"] != "WorkerCapabilities":
            raise second.death()
        yield WorkloadTrial(order, first, second)


class FramedProcess:
    """A process that answers requests on its pipes, one at a time."""

    def __init__(self, requests: IO[bytes], replies: IO[bytes], log: Path) -> None:
        self._requests = requests
        self._replies = replies
        self._log = log

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """The reply that ends a request."""
        try:
            self._requests.write(frame(msgspec.msgpack.encode(request)))
            self._requests.flush()
        except BrokenPipeError:
            raise self.death() from None
        while (reply := self.read())["type"] == "ShardProgress":
            pass
        return reply

    def read(self) -> dict[str, Any]:
        """The next reply."""
        payload = read_frame(self._replies)  # type: ignore[arg-type]  # a pipe reads like a file
        if payload is None:
            raise self.death()
        reply: dict[str, Any] = msgspec.msgpack.decode(payload)
        return reply

    def death(self) -> HyperGPUError:
        """The error of a process that ended, with the last line that it wrote."""
        last_line = self._log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
        return _failure(f"its process ended: {last_line or 'it said nothing'}")


@contextmanager
def start_framed(command: list[str], log: Path) -> Iterator[FramedProcess]:
    """A process that leaves when its stdin is closed."""
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=public_environment(),
        ) as process,
    ):
        if process.stdin is None or process.stdout is None:
            raise AssertionError("it was started with pipes")
        yield FramedProcess(process.stdin, process.stdout, log)


def _require(kind: str, reply: Mapping[str, Any], reason: str) -> None:
    if reply["type"] != kind:
        raise _failure(str(reply.get(reason) or reply["type"]))


def _failure(said: str) -> HyperGPUError:
    detail, _, fix = said.partition(" Fix: ")
    return HyperGPUError(
        Reason.WORKER_UNUSABLE,
        detail.rstrip("."),
        fix=fix or "change the workload where it raises this",
    )
