"""The floor: gather, mean and broadcast of raw float32 through torch's gloo, nothing else."""

import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist

from benchmarks.peers.measured import WARM_UP_ROUNDS, arguments, report, running, same_script

HUB = 0


def mean(updates: list[torch.Tensor]) -> torch.Tensor:
    """Average in the first update's own memory: the floor allocates nothing in a round."""
    total = updates[0]
    for update in updates[1:]:
        total += update
    return total.div_(len(updates))


def take_part(options: argparse.Namespace, rank: int, store_path: str) -> list[float]:
    """Run every round as process ``rank`` and return when each ended."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    world = options.nodes + 1
    store_url = f"file://{store_path}"
    dist.init_process_group("gloo", init_method=store_url, rank=rank, world_size=world)
    update = torch.full((options.parameters,), float(rank))
    model = torch.empty_like(update)
    received_updates = [torch.empty_like(update) for _ in range(world)] if rank == HUB else None
    ends_s = []
    for _ in range(options.rounds + WARM_UP_ROUNDS):
        dist.gather(update, received_updates, dst=HUB)
        if received_updates:
            model = mean(received_updates[1:])
        dist.broadcast(model, src=HUB)
        ends_s.append(time.monotonic())
    dist.destroy_process_group()
    return ends_s


def main() -> None:
    """Start the nodes and be the hub, or be one node."""
    options = arguments()
    if options.rank > HUB:
        take_part(options, options.rank, options.address)
        return
    with tempfile.TemporaryDirectory() as folder:
        store_path = f"{folder}/store"
        nodes = [same_script(options, rank, store_path) for rank in range(1, options.nodes + 1)]
        with running(nodes):
            report(take_part(options, HUB, store_path))


if __name__ == "__main__":
    main()
