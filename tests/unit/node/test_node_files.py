"""What a node keeps on its disk: its state, its key, its receipts."""

import socket
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from gpu_node.__main__ import app
from gpu_node.core.memory import Memory, TrainingStart, with_finished
from gpu_node.shell.folder.receipts import (
    NEWEST_FILE,
    TALLY_FILE,
    TERMS_FILE,
    OwnTally,
    ReceiptKeeper,
)
from gpu_node.shell.folder.state import (
    StatePaths,
    identity_key,
    load_capabilities,
    load_coordinator,
    load_memory,
    node_name,
    save_memory,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId
from hypergpu.keys import Passphrase, passphrase_of_file, place_beside
from hypergpu.ledger_terms import Domain, Terms
from hypergpu.statements import SignedReceipt
from tests.properties.statements import JOB, TERMS, Work, node_key, signed_receipt
from tests.unit.node.node_states import SESSION_JOB, assignment, update


def test_memory_outlives_the_daemon_word_for_word(tmp_path: Path) -> None:
    memory = with_finished(Memory(), assignment(), TrainingStart(2, returns_update=True), update())
    with StatePaths(tmp_path) as paths:
        save_memory(paths, memory)
        assert load_memory(paths) == memory


@pytest.mark.parametrize("content", [b'{"jobs": ', b'{"jobs":{"\xff":{}}}'])
def test_a_damaged_memory_is_refused_with_the_fix(tmp_path: Path, content: bytes) -> None:
    with StatePaths(tmp_path) as paths:
        paths.memory.write_bytes(content)
        with pytest.raises(HyperGPUError, match="delete it with"):
            load_memory(paths)


def test_who_the_node_joined_is_asked_again_where_its_file_is_no_text(tmp_path: Path) -> None:
    with StatePaths(tmp_path) as paths:
        paths.coordinator.write_bytes(b'{"address":"\xff"}')
        with pytest.raises(HyperGPUError, match="join again"):
            load_coordinator(paths)


def test_a_worker_that_is_no_text_is_as_none(tmp_path: Path) -> None:
    with StatePaths(tmp_path) as paths:
        paths.worker.write_bytes(b'{"type":"WorkerCapabilities","device":"\xff"}')
        assert load_capabilities(paths, "numpy") is None


def test_a_node_is_called_what_it_was_told_the_last_time(tmp_path: Path) -> None:
    with StatePaths(tmp_path) as paths:
        assert node_name(paths, "") == socket.gethostname()
        assert node_name(paths, "attic") == node_name(paths, "") == "attic"
        assert node_name(paths, "cellar") == node_name(paths, "") == "cellar"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up"])
def test_a_jobs_id_never_leads_out_of_the_state_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(HyperGPUError, match="no job's id"):
        StatePaths(tmp_path).job(JobId(name))


def test_what_an_unfinished_training_left_goes_before_the_next(tmp_path: Path) -> None:
    names = ["end-3.safetensors", "update-3", "end-4.safetensors", "update-4", ".update-4.partial"]
    with StatePaths(tmp_path) as paths:
        folder = paths.job(SESSION_JOB)
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        paths.delete_unfinished(SESSION_JOB, kept_rounds=(3,))
        assert sorted(path.name for path in folder.iterdir()) == ["end-3.safetensors", "update-3"]


def test_deleting_a_job_leaves_the_others(tmp_path: Path) -> None:
    with StatePaths(tmp_path) as paths:
        other = JobId("job-other")
        for job_id in (SESSION_JOB, other):
            paths.job(job_id).mkdir()
        paths.delete_job(SESSION_JOB)
        assert [path.name for path in paths.jobs.iterdir()] == [other]


GIVEN = Passphrase(b"given", "the test", is_made=True)


def folder(tmp_path: Path) -> StatePaths:
    with StatePaths(tmp_path / "node") as paths:
        return paths


def test_an_unattended_node_makes_a_passphrase_beside_its_folder(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    key = identity_key(paths)
    assert identity_key(paths).secret == key.secret
    assert place_beside(paths.root) == tmp_path / "node.passphrase"
    assert place_beside(paths.root).stat().st_mode & 0o777 == 0o600
    assert key.secret.hex() not in paths.identity.read_text()


def test_a_copy_of_the_folder_alone_opens_nothing(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    identity_key(paths)
    stolen_paths = StatePaths(paths.root.rename(tmp_path / "copy"))
    with pytest.raises(HyperGPUError, match=r"copy\.passphrase cannot be read: No such file"):
        identity_key(stolen_paths)
    assert not place_beside(stolen_paths.root).exists()


def test_a_given_passphrase_is_kept_nowhere(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    key = identity_key(paths, GIVEN)
    assert identity_key(paths, GIVEN).secret == key.secret
    assert not place_beside(paths.root).exists()
    with pytest.raises(HyperGPUError, match="cannot be read"):
        identity_key(paths)


def test_a_volume_of_its_own_is_given_a_passphrase_by_hand() -> None:
    with pytest.raises(HyperGPUError, match="is a volume of its own") as failure:
        identity_key(StatePaths(Path("/proc")))
    assert "--passphrase-file" in failure.value.fix


def test_a_key_that_belongs_to_a_lost_passphrase_is_not_written_over(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    identity_key(paths)
    before = paths.identity.read_bytes()
    place_beside(paths.root).write_text("another\n")
    with pytest.raises(HyperGPUError, match=r"from .*node\.passphrase does not open"):
        identity_key(paths)
    assert paths.identity.read_bytes() == before


def test_the_passphrase_is_changed_by_a_command(tmp_path: Path) -> None:
    paths = folder(tmp_path)
    key = identity_key(paths)
    words = tmp_path / "words"
    words.write_text("correct horse battery staple\n")
    words.chmod(0o600)
    arguments = ["passphrase", "--new", str(words), "--state-dir", str(paths.root)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert identity_key(paths, passphrase_of_file(words)).secret == key.secret
    again = CliRunner().invoke(app, [*arguments, "--passphrase-file", str(words)])
    assert again.exit_code == 0, again.output
    rejection = CliRunner().invoke(app, arguments).exception
    assert isinstance(rejection, HyperGPUError)
    assert rejection.reason is Reason.FILE_UNUSABLE


RECEIVER = node_key(1)
SCORE = 320 * 9_000


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path)


def keeper(paths: StatePaths) -> ReceiptKeeper:
    return ReceiptKeeper(paths, RECEIVER.node_id)


def receipt(number: int, *, before: int | None = None) -> SignedReceipt:
    """The receipt of a round, the node's ``number``-th."""
    total = number * SCORE if before is None else before
    return signed_receipt(RECEIVER, Work(round=number), sequence=number, before=total)


def file(paths: StatePaths, name: str) -> Path:
    return paths.ledger / TERMS.job / name


def test_the_newest_receipt_of_a_job_is_kept_over_restarts(paths: StatePaths) -> None:
    first = keeper(paths)
    first.agree(JOB, TERMS)
    first.take(JOB, [receipt(0), receipt(1)])
    first.take(JOB, [receipt(0)])
    assert keeper(paths).newest() == ((JOB, receipt(1)),)
    stored_receipt = msgspec.json.decode(file(paths, NEWEST_FILE).read_bytes(), type=SignedReceipt)
    assert stored_receipt == receipt(1)


def test_a_receipt_that_counts_less_than_the_one_before_replaces_nothing(paths: StatePaths) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    mine.take(JOB, [receipt(1)])
    mine.take(JOB, [receipt(2, before=0)])
    assert mine.newest() == ((JOB, receipt(1)),)


@pytest.mark.parametrize(
    ("signed", "why"),
    [
        (signed_receipt(node_key(2), Work()), "another job or node"),
        (msgspec.structs.replace(receipt(0), signature=bytes(65)), "did not sign it"),
    ],
)
def test_a_receipt_that_is_not_owed_to_this_node_is_refused(
    paths: StatePaths, signed: SignedReceipt, why: str
) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    with pytest.raises(HyperGPUError, match=why) as failure:
        mine.take(JOB, [signed])
    assert failure.value.reason is Reason.SIGNATURE_INVALID
    assert mine.newest() == ()


def test_a_receipt_of_an_unknown_job_needs_its_terms(paths: StatePaths) -> None:
    mine = keeper(paths)
    with pytest.raises(HyperGPUError, match="knows no terms"):
        mine.take(JOB, [receipt(0)])
    with pytest.raises(HyperGPUError, match="another job's"):
        mine.take(JobId("job-other"), [receipt(0)], TERMS)
    mine.take(JOB, [receipt(0)], TERMS)
    assert keeper(paths).newest() == ((JOB, receipt(0)),)


def test_a_job_never_changes_its_ledger(paths: StatePaths) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    moved_terms = Terms(TERMS.job, TERMS.coordinator, Domain(1, Address("0x" + "99" * 20)))
    assert "now on chain 1, contract 0x99" in mine.changed_terms(JOB, moved_terms)
    with pytest.raises(HyperGPUError, match="counts on chain 31337"):
        mine.agree(JOB, moved_terms)
    assert mine.changed_terms(JOB, TERMS) == ""


@pytest.mark.parametrize("name", [TERMS_FILE, NEWEST_FILE, TALLY_FILE])
def test_a_damaged_file_is_put_aside_and_made_again(paths: StatePaths, name: str) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    mine.count_accepted(TERMS, 0, 320)
    mine.take(JOB, [receipt(0)])
    file(paths, name).write_bytes(file(paths, name).read_bytes()[:-9])
    again = keeper(paths)
    again.take(JOB, [receipt(1)], TERMS)
    again.count_accepted(TERMS, 1, 320)
    assert file(paths, name + ".damaged").exists()
    assert keeper(paths).newest() == ((JOB, receipt(1)),)


def test_an_acceptance_that_is_heard_of_twice_counts_once(paths: StatePaths) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    for round_number in (0, 1, 1, 0):
        mine.count_accepted(TERMS, round_number, 320)
    stored_tally = msgspec.json.decode(file(paths, TALLY_FILE).read_bytes(), type=OwnTally)
    assert stored_tally == OwnTally(accepted=2, samples=640, last_round=1)


def test_a_coordinator_that_counts_too_few_updates_is_named_once(paths: StatePaths) -> None:
    mine = keeper(paths)
    mine.agree(JOB, TERMS)
    for round_number in range(20):
        mine.count_accepted(TERMS, round_number, 320)
    with capture_logs() as logs:
        mine.take(JOB, [receipt(0)])
        mine.take(JOB, [receipt(1)])
    (warning,) = [each for each in logs if each["log_level"] == "warning"]
    assert (warning["receipts"], warning["accepted"]) == (1, 20)
    assert "hypergpu ledger claim" in warning["fix"]


def test_work_without_terms_leaves_nothing_behind(paths: StatePaths) -> None:
    keeper(paths).agree(JOB, Terms())
    assert not paths.ledger.exists()


def test_a_state_folder_is_absolute_since_the_worker_runs_in_one_of_its_own() -> None:
    assert StatePaths(Path("demo-out/node")).inputs == Path.cwd() / "demo-out/node/inputs"
