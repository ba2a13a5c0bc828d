"""A GPU's figures in at most eight minutes: steps of a byte GPT, codecs, and training behind lines.

Each part writes its figures as soon as it has them, with the card's name, so that a run that is
cut still gives some. Without a GPU, ``--dry`` runs every part small on the processor.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from benchmarks.ours.codec_rates import codec_rates
from benchmarks.ours.job_files import job_tree, text_of
from gpu_node.shell.worker.torch_engine import TorchTrainer
from gpu_node.shell.worker.trainer import InitialState
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.optimizer import OptimizerRule
from hypergpu.workloads.networks.task import Device, TorchWorkload, chosen_device, module_initial
from hypergpu.workloads.registry import build_for_job, find
from netsim.compare.compare import NetsimRun, execute_run
from netsim.link import NetsimError
from netsim.run.report import RunReport
from netsim.tunnel.tunnel import require_tunnel

ROOT = Path(__file__).parents[2]
LIMIT_S = 480.0
WORLD = ROOT / "benchmarks" / "worlds" / "gpu.toml"
JOB = WORLD.parent / "jobs" / "gpu.toml"
Figures = dict[str, float | str]
"""By key; keys end with the figure's unit."""


class Sizes(NamedTuple):
    """How much is measured."""

    options: dict[str, int]
    """Options of the byte GPT."""
    batch: int
    steps: int
    loss_s: float
    """Time for which the loss is followed."""
    codec_values: int
    rounds: int
    inner_steps: int


WHOLE = Sizes(
    {"width": 928, "layers": 12, "heads": 16, "block_length": 512}, 32, 20, 60.0, 1 << 24, 6, 20
)
"""124M parameters, as many as the smallest GPT-2 has."""
DRY = Sizes({"width": 32, "layers": 2, "heads": 4, "block_length": 64}, 4, 4, 2.0, 1 << 18, 2, 2)


class GpuBenchmark:
    """The parts, and what they share.

    Args:
        out: Gets every part's figures, as JSON.
    """

    def __init__(self, sizes: Sizes, out: Path) -> None:
        self._sizes = sizes
        self._out = out
        self._figures: dict[str, Figures] = {}
        self._device = chosen_device()
        self._started_s = time.monotonic()

    def run(self) -> int:
        """Run the parts in order while there is time; returns 1 where one failed."""
        parts: dict[str, Callable[[], Figures]] = {
            "device": self.device_figures,
            "steps": self.step_figures,
            "codecs": self.codec_figures,
            "lines": self.line_figures,
            "loss": self.loss_figures,
            "tests": self.run_tests,
        }
        failures = 0
        for name, measure in parts.items():
            left_s = self._started_s + LIMIT_S - time.monotonic()
            if left_s <= 0:
                self.record(name, {"left_out": "the eight minutes are over"})
                continue
            try:
                self.record(name, measure())
            except (
                HyperGPUError,
                NetsimError,
                RuntimeError,
                OSError,
                subprocess.TimeoutExpired,
            ) as error:
                failures += 1
                self.record(name, {"error": str(error)})
        return min(failures, 1)

    def record(self, name: str, figures: Figures) -> None:
        """Print a part's figures, and write all so far."""
        self._figures[name] = figures
        self._out.parent.mkdir(parents=True, exist_ok=True)
        partial = self._out.with_suffix(".part")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self._figures), indent=2))
        partial.replace(self._out)
        for key, value in figures.items():
            text = f"{value:.4g}" if isinstance(value, float) else value
            print(f"{name:8} {key:32} {text}", flush=True)  # noqa: T201

    def device_figures(self) -> Figures:
        """The device, and the software on it."""
        figures: Figures = {
            "kind": self._device.kind,
            "name": self._device.name,
            "memory_gib": self._device.memory_bytes / 2**30,
            "torch": str(torch.__version__),
            "python": sys.version.split()[0],
        }
        if self._device.kind == "cuda":
            major, minor = torch.cuda.get_device_capability()
            figures |= {"compute_capability": f"{major}.{minor}", "cuda": torch.version.cuda or ""}
        return figures

    def step_figures(self) -> Figures:
        """Tokens a second of the worker's own trainer, by optimizer and precision."""
        figures: Figures = {"parameters": float(self._trainer("adamw").layout.parameters_count)}
        precisions = {"float32": False} | ({"bf16": True} if self._device.has_bf16 else {})
        for optimizer in ("adamw", "muon"):
            for name, has_bf16 in precisions.items():
                trainer = self._trainer(optimizer, has_bf16=has_bf16)
                key = f"{optimizer}_{name}_tokens_per_s"
                figures[key] = self._tokens_per_s(trainer)
        return figures

    def loss_figures(self) -> Figures:
        """Loss against tokens, by AdamW and by Muon, in the same time."""
        figures: Figures = {}
        for optimizer in ("adamw", "muon"):
            trainer = self._trainer(optimizer, has_bf16=self._device.has_bf16)
            end_s, number, losses = time.monotonic() + self._sizes.loss_s, 0, []
            while time.monotonic() < end_s:
                losses.append(float(trainer.step(self._batch(trainer, number), 3e-4)))
                number += 1
            tail = losses[-max(1, len(losses) // 10) :]
            figures[f"{optimizer}_loss"] = sum(tail) / len(tail)
            figures[f"{optimizer}_tokens"] = float(number * self._step_tokens)
        return figures

    def codec_figures(self) -> Figures:
        """Encoding with error feedback, on the processor, as a node does it."""
        rates = codec_rates(self._sizes.codec_values, repeats=3)
        return {f"{name}_gb_per_s": rate for name, rate in rates.items()}

    def line_figures(self) -> Figures:
        """The same GPT trained by two nodes behind home lines: real daemons and packets."""
        backend, note = "tunnel", "network namespaces"
        try:
            require_tunnel()
        except NetsimError as error:
            backend, note = "proxy", f"proxies: {error}"
        with TemporaryDirectory(prefix="hypergpu-gpu-") as folder:
            job = Path(folder) / "job.toml"
            job.write_text(job_text(self._sizes), encoding="utf-8")
            words = (str(WORLD), "--job", str(job), "--backend", backend, "--worker", "torch")
            run = NetsimRun("gpu", (*words, "--give-up-after", "150"))
            report = execute_run(run, digest_of(b"gpu"), Path(folder))
        return {"lines": note, **report_figures(report, self._sizes)}

    def run_tests(self) -> Figures:
        """The tests that need a GPU."""
        if self._device.kind != "cuda":
            return {"left_out": "there is no CUDA device"}
        if importlib.util.find_spec("pytest") is None:
            return {"left_out": "pytest is not here: carry its wheels"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
        environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
        process = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(1.0, self._started_s + LIMIT_S - time.monotonic()),
        )
        lines = process.stdout.strip().splitlines() or [process.stderr.strip()[-300:]]
        if process.returncode:
            raise RuntimeError(f"tests failed: {lines[-1]}")
        return {"tests": lines[-1]}

    @property
    def _step_tokens(self) -> int:
        return self._sizes.batch * self._sizes.options["block_length"]

    def _trainer(self, optimizer: str, *, has_bf16: bool = False) -> TorchTrainer:
        """A trainer of the GPT at its first model."""
        workload: TorchWorkload = build_for_job(find("text-gpt"), self._options(), "")
        samples = workload.load("").train
        device = Device(self._device.kind, "", self._device.memory_bytes, has_bf16)
        trainer = TorchTrainer(workload, device, samples)
        first = module_initial(workload.model, 1)
        trainer.begin(InitialState(first, 1, None, optimizer_rule(optimizer)))
        return trainer

    def _options(self) -> Mapping[str, Any]:
        defaults = {option.name: option.default for option in find("text-gpt").options}
        return {**defaults, **self._sizes.options}

    def _batch(self, trainer: TorchTrainer, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        first = number * self._sizes.batch
        return np.arange(first, first + self._sizes.batch, dtype=np.int64) % len(
            trainer.samples.labels
        )

    def _tokens_per_s(self, trainer: TorchTrainer) -> float:
        """Over the steps after three that warm up; reading the loss waits for the device."""
        for number in range(3):
            float(trainer.step(self._batch(trainer, number), 3e-4))
        started_s = time.monotonic()
        losses = [
            trainer.step(self._batch(trainer, number), 3e-4) for number in range(self._sizes.steps)
        ]
        float(losses[-1])
        return self._sizes.steps * self._step_tokens / (time.monotonic() - started_s)


def optimizer_rule(name: str) -> OptimizerRule:
    """The rule as a job that names the optimizer has it."""
    return (
        OptimizerRule(name=name, momentum=0.95, muon_ratio=1.0)
        if name == "muon"
        else OptimizerRule()
    )


def job_text(sizes: Sizes) -> str:
    """The job of the part behind lines, in these sizes."""
    tree = job_tree(JOB)
    tree["options"] |= sizes.options
    lengths = {"rounds": sizes.rounds, "inner_steps": sizes.inner_steps, "batch_size": sizes.batch}
    tree["training"] |= lengths
    return text_of(tree)


def report_figures(report: RunReport, sizes: Sizes) -> Figures:
    """Tokens a second, and loss against tokens and bytes."""
    rounds, block = report.rounds, sizes.options["block_length"]
    if not rounds:
        raise RuntimeError(f"no round closed: {report.phase}, {report.reason}")
    tokens = sum(each.samples for each in rounds) * block
    bytes_moved = sum(each.bytes_up + (each.bytes_down or 0) for each in rounds)
    figures: Figures = {
        "rounds": float(len(rounds)),
        "tokens": float(tokens),
        "tokens_per_s": tokens / (rounds[-1].ended_ms / 1000),
        "bytes": float(bytes_moved),
        "bytes_per_token": bytes_moved / tokens,
        "links": "valid" if report.verdict.is_valid else "late: the lines did not keep their times",
    }
    for each in report.evaluations:
        figures[f"perplexity_after_{each.samples * block}_tokens"] = each.metric or float("nan")
    return figures


def main() -> int:
    """Run what the command line says; returns 1 where a part failed, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="make bench-gpu", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small, on whatever device there is")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu.json")
    options = parser.parse_args()
    if not options.dry and chosen_device().kind == "cpu":
        text = "there is no GPU that torch can use. Fix: see `hypergpu doctor`, or try DRY=1"
        print(text, file=sys.stderr)  # noqa: T201
        return 2
    return GpuBenchmark(DRY if options.dry else WHOLE, options.out).run()


if __name__ == "__main__":
    raise SystemExit(main())
