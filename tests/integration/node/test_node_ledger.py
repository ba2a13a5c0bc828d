"""What a node lost of an ended job's ledger folder comes back from the coordinator."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hypergpu.cli.ledger.wallet import wallet_view
from hypergpu.jobfile.spec import CodecChoice, JobSpec, Pay, TrainingSettings
from tests.processes import Cluster, NodeProcess

ROUNDS = 3
SPEC = JobSpec(
    workload="null",
    options={"parameters": 64},
    training=TrainingSettings(rounds=ROUNDS, inner_steps=2, batch_size=50, nodes=1),
    codec=CodecChoice("fp32", "fp32"),
    pay=Pay(unit_price=1_000, rounds_per_epoch=2),
)
FILES = ("terms.json", "receipts.jsonl", "voucher.json")


class Ended(Cluster):
    """A cluster whose one node has all that an ended job owes it."""

    def __enter__(self) -> "Ended":
        super().__enter__()
        self.add_nodes(1, "null")
        self.job_id = self.submit(SPEC)
        assert self.finished(self.job_id).phase == "finished"
        self.wait_until(lambda: f'"sequence":{ROUNDS},'.encode() in self.read("voucher.json"))
        return self

    @property
    def node(self) -> NodeProcess:
        (node,) = self.nodes
        return node

    @property
    def ledger(self) -> Path:
        return self.node.state_dir / "ledger"

    def read(self, name: str) -> bytes:
        """A file of the job's folder; nothing while it is not there."""
        for path in self.ledger.glob(f"{self.job_id}@*/{name}"):
            with contextlib.suppress(FileNotFoundError):  # It was put aside meanwhile.
                return path.read_bytes()
        return b""

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self.job(self.job_id)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    with Ended(tmp_path_factory.mktemp("ledger")) as ended:
        yield ended


def lose_all(ledger: Path) -> None:
    shutil.rmtree(ledger)


def lose_terms(ledger: Path) -> None:
    (path,) = ledger.glob("*/terms.json")
    path.unlink()


def cut_terms(ledger: Path) -> None:
    (path,) = ledger.glob("*/terms.json")
    path.write_bytes(path.read_bytes()[:-20])


def change_terms(ledger: Path) -> None:
    (path,) = ledger.glob("*/terms.json")
    path.write_bytes(path.read_bytes().replace(b'"chain_id":0', b'"chain_id":7'))


def raise_voucher(ledger: Path) -> None:
    (path,) = ledger.glob("*/voucher.json")
    path.write_bytes(path.read_bytes().replace(b'"amount":', b'"amount":9'))


def cut_voucher(ledger: Path) -> None:
    (path,) = ledger.glob("*/voucher.json")
    path.write_bytes(path.read_bytes()[:-20])


def delete_a_line(ledger: Path) -> None:
    (path,) = ledger.glob("*/receipts.jsonl")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))


DAMAGES = (
    lose_all,
    lose_terms,
    cut_terms,
    change_terms,
    raise_voucher,
    cut_voucher,
    delete_a_line,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_was_lost_comes_back_to_the_last_byte(
    ended: Ended, damage: Callable[[Path], None]
) -> None:
    before = [ended.read(name) for name in FILES]
    assert all(before)
    ended.node.kill()
    damage(ended.ledger)
    ended.node.run()
    ended.wait_until(lambda: [ended.read(name) for name in FILES] == before)
    (job,) = wallet_view(ended.node.state_dir).jobs
    assert (job.receipts, job.unsound, job.damaged, job.incomplete) == (ROUNDS, 0, "", "")
