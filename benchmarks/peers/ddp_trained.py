"""DistributedDataParallel over gloo on loopback, trained to a target: a centralised cluster.

A step lasts as long as the floor at least, which is what a slower device would compute; gradients
travel within it. Evaluations and what the nodes wait for them are not on the clock.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.measured import DEADLINE_S, LOOPBACK, free_port, running
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from gpu_node.shell.worker.torch_optimizer import TorchOptimizer
from hypergpu.assignment import SampleRange
from hypergpu.jobfile.reading import read_job_file
from hypergpu.jobfile.spec import JobSpec
from hypergpu.partitions import stream_indices
from hypergpu.tensors.layout import Flat
from hypergpu.units import Samples
from hypergpu.workloads.networks.task import (
    TorchWorkload,
    load_module,
    module_initial,
    module_layout,
    store_module,
)
from hypergpu.workloads.registry import build, find

_LIMIT = timedelta(seconds=DEADLINE_S)
_RESULT = "result"


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Read the options; ``rank`` and ``port`` are for spawned processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--floor-ms", type=int, required=True)
    parser.add_argument("--steps-most", type=int, required=True)
    parser.add_argument("--evaluate-every", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--port", type=int, default=0)
    return parser.parse_args(words)


class DdpNode:
    """One process of the cluster. The first one judges the model."""

    def __init__(self, options: argparse.Namespace, spec: JobSpec) -> None:
        self._options, self._shape, self._target = options, spec.training, spec.evaluation.target
        self._workload: TorchWorkload = build(find(spec.workload), spec.options)
        module = self._workload.model().train()
        self._layout = module_layout(module)
        load_module(module, self._layout, module_initial(self._workload.model, options.seed))
        self._module, self._model = module, DistributedDataParallel(module)
        self._optimizer = TorchOptimizer(module, torch.device("cpu"))
        self._optimizer.begin(spec.inner.rule, None)
        self._rate = spec.inner.learning_rate
        self._judge = TorchEvaluator(self._workload, "")
        self._samples = self._judge.dataset.train
        self._members = np.arange(len(self._samples.labels), dtype=np.int64)

    def train(self) -> dict[str, float]:
        """Steps and clock seconds to the first evaluation at the target, and its metric."""
        clock_s, metric = 0.0, 0.0
        for number in range(1, self._options.steps_most + 1):
            began_s = time.monotonic()
            self._step(number - 1)
            time.sleep(max(0.0, self._options.floor_ms / 1000 - (time.monotonic() - began_s)))
            clock_s += time.monotonic() - began_s
            if number % self._options.evaluate_every == 0:
                metric = self._metric()
                if metric >= self._target:
                    return {"steps": number, "seconds": clock_s, "metric": metric}
        return {"steps": 0, "seconds": clock_s, "metric": metric}

    def _step(self, number: int) -> None:
        batch = self._shape.batch_size
        start = (number * self._shape.nodes + self._options.rank) * batch
        ranges = [SampleRange(start, Samples(batch))]
        indices = stream_indices(self._members, 0, self._options.seed, ranges)
        fields = [torch.from_numpy(each) for each in self._samples.batch(indices)]
        self._model.zero_grad(set_to_none=True)
        self._workload.loss(self._model, *fields).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(self._rate)

    def _metric(self) -> float:
        """Metric of the held-out samples, which the first node tells the others."""
        metric = torch.zeros(())
        if self._options.rank == 0:
            flat = Flat.empty(self._layout)
            store_module(self._module, self._layout, flat)
            metric.fill_(self._judge.evaluate(flat).metric("accuracy"))
        dist.broadcast(metric, 0)
        dist.barrier()
        return float(metric)


def be_node(options: argparse.Namespace) -> None:
    """Train; the first node says what it took."""
    spec = read_job_file(options.job)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = TCPStore(LOOPBACK, options.port, is_master=False, timeout=_LIMIT)
    dist.init_process_group(
        "gloo", store=store, rank=options.rank, world_size=spec.training.nodes, timeout=_LIMIT
    )
    outcome = DdpNode(options, spec).train()
    if options.rank == 0:
        store.set(_RESULT, json.dumps(outcome))
    store.add("done", 1)
    dist.destroy_process_group()


def main() -> None:
    """Hold the store and start the nodes, or be one node."""
    options = options_of(sys.argv[1:])
    if options.rank >= 0:
        be_node(options)
        return
    nodes, port = read_job_file(options.job).training.nodes, free_port()
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=_LIMIT)
    this = [sys.executable, "-m", "benchmarks.peers.ddp_trained", *sys.argv[1:]]
    commands = [[*this, f"--rank={rank}", f"--port={port}"] for rank in range(nodes)]
    with running(commands):
        outcome = store.get(_RESULT).decode()
        while store.add("done", 0) < nodes:
            time.sleep(0.1)
    print(outcome, flush=True)


if __name__ == "__main__":
    main()
