"""Two coordinators that may each drive, and nodes: what faults are tried on."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from hypergpu.jobfile.spec import JobSpec, RoundRule, TrainingSettings, Trust
from hypergpu.user.client import Coordinator
from hypergpu.user.client.connection import ConnectionTarget
from hypergpu.user.cluster.cluster import CALL_TIMEOUT_S
from hypergpu.user.cluster.s3_server import BUCKET, S3Server
from hypergpu.wire.credentials import Token, parse_token
from tests.polling import first_true
from tests.processes import Cluster, CoordinatorProcess, Happening, accepted_updates

ROUNDS, NODES = 8, 2
SPEC = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    training=TrainingSettings(rounds=ROUNDS, inner_steps=20, nodes=NODES),
    # Who is late by a fault takes part all the same: else the model would be another one.
    round=RoundRule(quorum=1.0),
    trust=Trust(duplicates="none"),
)
_TOLD = frozenset(
    {"RoundMeasured", "JobEnded", "AggregateReady", "ModelLost", "CoordinatorChanged", "NodeLost"}
)
"""Events that say why receipts lack."""


class PairedCluster(Cluster):
    """Asks whichever of two coordinators drives."""

    token: Token | None = None
    """The operator's, once there is one."""
    others: tuple[str, ...] = ()

    def client(self) -> Coordinator:
        assert self.token is not None, "start it first"
        address = self.coordinator.address
        others = tuple(each for each in self.others if each != address)
        return Coordinator(ConnectionTarget(address, self.token, CALL_TIMEOUT_S, others))


class CoordinatorPair:
    """The first one drives when its block begins, and the second one stands by."""

    def __init__(self, folder: Path, urls: tuple[str, str], server: S3Server) -> None:
        """Nothing runs yet.

        Args:
            folder: Gets everything.
            urls: Of the database, as the first and as the second one sees it.
            server: Keeps the blobs.
        """
        passphrase = folder / "passphrase"
        passphrase.write_text("two words\n")
        passphrase.chmod(0o600)
        shared_options = (
            *("--takeover", "--passphrase-file", str(passphrase)),
            *("--blobs", f"s3://{BUCKET}/{folder.name}", "--heartbeat-interval-ms", "1000"),
        )
        first, second = ((*shared_options, "--database-url", url) for url in urls)
        self.cluster = PairedCluster(folder / "first", *first, is_plaintext=False)
        self.first = self.cluster.coordinator
        self.second = CoordinatorProcess(folder / "second", *second, is_plaintext=False)
        self.cluster.others = (self.first.address, self.second.address)
        for each in (self.first, self.second):
            each.environment = dict(server.environment)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.end)
            self.first.start()
            text = (self.first.data_dir / "operator.token").read_text("utf-8")
            self.cluster.token = parse_token(text)
            self.second.launch()
            self.second.wait_until_standing_by()
            self.cluster.add_nodes(NODES)
            stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Leave nothing behind."""
        for node in self.cluster.nodes:
            node.end()
        for coordinator in (self.first, self.second):
            coordinator.end()

    def let_drive(self, coordinator: CoordinatorProcess) -> None:
        """Wait until a standby serves, and ask it first from now on."""
        coordinator.wait_until_serving()
        self.cluster.coordinator = coordinator


def is_round(number: int) -> Callable[[Happening], bool]:
    """Whether an event records this round, or a later one."""
    return lambda happening: (
        happening.kind == "RoundRecorded" and happening.fields["round"] >= number
    )


def check_whole(cluster: Cluster, job_id: str, digest: str) -> None:
    """The job is the undisturbed one: every update is accepted, measured and paid once."""
    job = cluster.wait_until_finished(job_id)
    events = list(cluster.events(job_id))
    accepted_pairs = [(number, node) for number, node, _ in accepted_updates(events)]
    assert len(accepted_pairs) == len(set(accepted_pairs)) == ROUNDS * NODES, accepted_pairs
    assert job.model == digest
    with cluster.client() as client:
        # Receipts follow the journal, a moment behind it.
        first_true(lambda: client.ledger(job_id).is_over)
        ledger = client.ledger(job_id)
        receipts = list(client.receipts(job_id))
    event_lines = [json.dumps([each.sequence, each.kind, each.fields]) for each in events]
    why = "\n".join(
        [*(line for line in event_lines if any(kind in line for kind in _TOLD)), str(ledger)]
    )
    assert [account.receipts for account in ledger.nodes] == [ROUNDS] * NODES, why
    paid_rounds = {
        (signed_receipt.receipt.node, signed_receipt.receipt.round) for signed_receipt in receipts
    }
    assert len(receipts) == len(paid_rounds) == ROUNDS * NODES, why
