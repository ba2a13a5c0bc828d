"""hivemind's decentralized averager: matchmaking and all-reduce of one float32 tensor, no hub."""

import argparse
import tempfile
import time
from pathlib import Path

import hivemind
import torch

from benchmarks.peers.measured import (
    DEADLINE_S,
    LOOPBACK,
    WARM_UP_ROUNDS,
    arguments,
    report,
    running,
    same_script,
)

FIRST = 0
POLL_S = 0.05


def entrance(path: Path) -> list[str]:
    """Wait until the first peer has written its addresses."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > give_up_at_s:
            raise TimeoutError(f"the first peer did not write {path} within {DEADLINE_S} s")
        time.sleep(POLL_S)
    return path.read_text(encoding="utf-8").split()


def open_entrance(path: Path, addresses: list[str]) -> None:
    """Write the first peer's addresses where the others look for them, all at once."""
    draft = path.with_suffix(".draft")
    draft.write_text(" ".join(addresses), encoding="utf-8")
    draft.rename(path)


def average(options: argparse.Namespace, rank: int, path: Path) -> list[float]:
    """Take part in every round and return when each ended."""
    torch.set_num_threads(1)
    dht = hivemind.DHT(
        initial_peers=[] if rank == FIRST else entrance(path),
        host_maddrs=[f"/ip4/{LOOPBACK}/tcp/0"],
        start=True,
    )
    if rank == FIRST:
        open_entrance(path, [str(address) for address in dht.get_visible_maddrs()])
    averager = hivemind.DecentralizedAverager(
        [torch.full((options.parameters,), float(rank))],
        dht,
        prefix="rounds",
        target_group_size=options.nodes,
        min_group_size=options.nodes,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        start=True,
    )
    ends_s: list[float] = []
    # Only the first peer counts. Peers may disagree whether a round succeeded, and one that left
    # when it had seen enough of them would leave the others to wait for ever.
    while rank != FIRST or len(ends_s) < options.rounds + WARM_UP_ROUNDS:
        # Peers find each other only once all are up: a step without a group is no round.
        if averager.step(allow_retries=True, timeout=DEADLINE_S) is not None:
            ends_s.append(time.monotonic())
    return ends_s


def main() -> None:
    """Start the other peers and be the first, or be one of the others."""
    options = arguments()
    if options.rank > FIRST:
        average(options, options.rank, Path(options.address))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "entrance"
        others = [same_script(options, rank, str(path)) for rank in range(1, options.nodes)]
        with running(others):
            report(average(options, FIRST, path))


if __name__ == "__main__":
    main()
