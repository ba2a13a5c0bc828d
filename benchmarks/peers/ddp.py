"""torch's DistributedDataParallel over gloo: every step's gradients go round all nodes.

What people use where a fast network is. Nodes run at the ends of netsim's links, or on loopback.
The hub only holds the store at which they meet.
"""

import argparse
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.flower_task import ends
from benchmarks.peers.measured import DEADLINE_S, running
from hypergpu.jobfile.reading import read_job_file
from hypergpu.workloads.networks.task import TorchWorkload
from hypergpu.workloads.registry import build, find

_LIMIT = timedelta(seconds=DEADLINE_S)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """Read the options; ``rank`` and ``address`` are for spawned processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--floor-ms", type=int, required=True)
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--address", default="")
    return parser.parse_args(words)


def device_to(host: str) -> str:
    """Name of the network device by which a host is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, each in interfaces if own in {address.address for address in each})


def be_node(options: argparse.Namespace) -> None:
    """Train; the first node says when each step ended."""
    spec = read_job_file(options.job)
    workload: TorchWorkload = build(find(spec.workload), spec.options)
    host, _, port = options.address.rpartition(":")
    os.environ["GLOO_SOCKET_IFNAME"] = device_to(host)
    torch.set_num_threads(1)
    store = TCPStore(host, int(port), is_master=False, timeout=_LIMIT)
    nodes = spec.training.nodes
    dist.init_process_group(
        "gloo", store=store, rank=options.rank, world_size=nodes, timeout=_LIMIT
    )
    torch.manual_seed(1)
    model = DistributedDataParallel(workload.model().train())
    adamw = torch.optim.AdamW(model.parameters(), lr=spec.inner.learning_rate)
    samples, batch = workload.load("").train, spec.training.batch_size
    ends_s = []
    for number in range(options.steps + 1):
        began_s = time.monotonic()
        start = (number * nodes + options.rank) * batch
        inputs, targets = map(
            torch.from_numpy, samples.batch(np.arange(start, start + batch) % len(samples.labels))
        )
        adamw.zero_grad()
        loss = workload.loss(model, inputs, targets)
        # A slower processor, as the world's nodes have, between forward and backward.
        time.sleep(max(0.0, options.floor_ms / 1000 - (time.monotonic() - began_s)))
        loss.backward()  # type: ignore[no-untyped-call]
        adamw.step()
        ends_s.append(time.monotonic())
    if options.rank == 0:
        seconds = [after - before for before, after in itertools.pairwise(ends_s)]
        store.set("seconds", json.dumps(seconds))
    store.add("done", 1)
    dist.destroy_process_group()


def main() -> None:
    """Hold the store and start the nodes, or be one node."""
    options = options_of(sys.argv[1:])
    if options.rank >= 0:
        be_node(options)
        return
    nodes = read_job_file(options.job).training.nodes
    hub_ends = ends(nodes)
    host, _, port = hub_ends.hub.rpartition(":")
    store = TCPStore(host, int(port), is_master=True, wait_for_workers=False, timeout=_LIMIT)
    this = [sys.executable, "-m", "benchmarks.peers.ddp", *sys.argv[1:]]
    commands = [
        [*prefix, *this, f"--rank={rank}", f"--address={address}"]
        for rank, (prefix, address) in enumerate(hub_ends.nodes)
    ]
    with running(commands):
        seconds = store.get("seconds").decode()
        while store.add("done", 0) < nodes:
            time.sleep(0.1)
    print(json.dumps({"seconds_per_step": json.loads(seconds)}), flush=True)


if __name__ == "__main__":
    main()
