"""The coordinator's end of a measured line: a real coordinator with a job of endless rounds.

Run as a program where the coordinator is: says a token for nodes, and ends with its input.
"""

import sys
from pathlib import Path

from hypergpu.cluster.coordinator import Listen, coordinator_command, operator, wait_until_ready
from hypergpu.cluster.leash import leashed
from hypergpu.cluster.processes import kill_group, start
from hypergpu.jobfile.spec import CodecChoice, Evaluation, Inner, JobSpec, Outer, TrainingSettings
from hypergpu.wire.token import Role

PARAMETERS = 1 << 20
SIZE_BYTES = 4 * PARAMETERS
"""Size of a model, and of an update."""
ROUNDS = 10_000
READY_WITHIN_S = 120.0
SPEC = JobSpec(
    workload="null",
    options={"parameters": PARAMETERS},
    training=TrainingSettings(rounds=ROUNDS, inner_steps=1, nodes=1),
    inner=Inner(),
    outer=Outer(learning_rate=1.0, momentum=0.0),
    codec=CodecChoice(up="fp32", down="fp32"),
    evaluation=Evaluation(every=ROUNDS),
)


def main() -> None:
    """Serve at an address until standard input ends."""
    folder, address = Path(sys.argv[1]), sys.argv[2]
    at = Listen(data_dir=folder / "coordinator", listen=address, port=0, node_port=0)
    log = folder / "coordinator.log"
    child = start(leashed(coordinator_command(at)), log=log, is_read=True)
    try:
        with operator(wait_until_ready(child, READY_WITHIN_S)) as client:
            client.submit(SPEC)
            token = client.create_token(Role.NODE, ttl_s=3600, uses=1, label="benchmark").token
        sys.stdout.write(f"{token}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        kill_group(child)


if __name__ == "__main__":
    main()
