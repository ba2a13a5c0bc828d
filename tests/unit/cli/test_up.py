"""What `up`, a demo and a run start and keep: coordinators, folders, the table of a race."""

import sys
from pathlib import Path

import pytest

from coordinator.__main__ import main as coordinator
from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import JobSpec
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.user.cli.demo.job import (
    COUNTED_NODES,
    SYNC_ROUNDS,
    SYNC_ROUNDS_SHORT,
    extrapolated_sync,
    plan,
    race_strategies,
    sync_ratio,
)
from hypergpu.user.cli.up import settled_by
from hypergpu.user.client.history import EvaluationPoint, History, RoundPoint
from hypergpu.user.client.settings import ResolvedSetting
from hypergpu.user.cluster.cluster import SettlingBy, wait_until_ready
from hypergpu.user.cluster.folder import RunFolder, require_own, run_folder
from hypergpu.user.cluster.processes import start

NO_CHAIN = {
    "chain": ResolvedSetting("none", "default"),
    "chain_url": ResolvedSetting("", "default"),
}


def test_a_coordinator_that_never_says_it_serves_is_killed() -> None:
    child = start([sys.executable, "-c", "import time; time.sleep(600)"], is_read=True)
    assert child.stdout is not None
    with child.stdout, pytest.raises(HyperGPUError, match="ended with status 137"):
        wait_until_ready(child, 0.5)
    assert child.poll() == -9


def test_settings_of_payments_reach_the_coordinator_by_its_environment() -> None:
    assert SettlingBy("anvil", retries_halted=True).environment() == {
        "HYPERGPU_COORDINATOR_CHAIN": "anvil",
        "HYPERGPU_COORDINATOR_RETRY_PAYMENTS": "1",
    }
    assert SettlingBy().environment() == {}


@pytest.mark.parametrize("name", ["CHAIN", "LEDGER_CONTRACT", "CHAIN_URL"])
def test_up_refuses_what_would_settle_nothing(name: str) -> None:
    rpc = "http://127.0.0.1:8545"
    environment = {f"HYPERGPU_COORDINATOR_{name}": rpc}
    settings = dict(NO_CHAIN)
    if name == "CHAIN_URL":
        settings["chain_url"] = ResolvedSetting(rpc, "env")
    with pytest.raises(HyperGPUError, match=f"nothing would be settled by .*_{name} ") as failure:
        settled_by(settings, environment)
    assert "HYPERGPU_CHAIN=NAME" in failure.value.fix
    settings["chain"] = ResolvedSetting("none", "env")
    assert settled_by(settings, environment)["HYPERGPU_COORDINATOR_CHAIN"] == "none"


def test_up_without_anything_of_a_chain_settles_on_none() -> None:
    assert settled_by(NO_CHAIN, {}) == {
        "HYPERGPU_COORDINATOR_CHAIN": "none",
        "HYPERGPU_COORDINATOR_CHAIN_URL": "",
    }


def test_a_setting_that_cannot_be_is_named_as_it_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert coordinator(["--port", "70000"]) == 2
    assert capsys.readouterr().err == (
        "ARGUMENT_INVALID (6002): port: Input should be less than or equal to 65535. Fix:"
        " correct HYPERGPU_COORDINATOR_PORT, or the flag: see hypergpu-coordinator --help\n"
    )


def of(path: Path) -> RunFolder:
    return RunFolder(path, ".mark", ("state", "summary.json"))


def test_what_an_earlier_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = of(tmp_path / "new" / "out")
    with run_folder(folder):
        (folder.path / "state").mkdir()
        for name in ("state/journal", "summary.json", "mine"):
            (folder.path / name).touch()
    with run_folder(folder):
        assert {each.name for each in folder.path.iterdir()} == {".mark", "mine"}


def test_a_folder_with_such_names_and_no_mark_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(HyperGPUError, match="is not of a run"), run_folder(of(tmp_path)):
        pass
    with pytest.raises(HyperGPUError, match="is not of a run"):
        require_own(of(tmp_path))
    assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_a_folder_in_which_a_run_goes_on_is_refused_and_kept(tmp_path: Path) -> None:
    folder = of(tmp_path)
    with run_folder(folder):
        (tmp_path / "state").mkdir()
        with pytest.raises(HyperGPUError, match="a run is going on in"), run_folder(folder):
            pass
        with pytest.raises(HyperGPUError, match="a run is going on in"):
            require_own(folder)
        assert (tmp_path / "state").exists()
    require_own(folder)
    assert (tmp_path / "state").exists()


FIXED = plan(5, is_short=True, worker="numpy")


def round_point(number: int, span_ms: int) -> RoundPoint:
    return RoundPoint(number=number, duration_ms=Milliseconds(span_ms))


def history(*rounds: RoundPoint, metric: float = 0.98, at_ms: int = 6000) -> History:
    only = EvaluationPoint(
        round=len(rounds),
        at_ms=Milliseconds(at_ms),
        loss=None,
        metric=metric,
        samples=Samples(1000),
        bytes_up=Bytes(0),
        bytes_down=Bytes(0),
    )
    return History(0, rounds, (only,), "accuracy")


def test_sync_is_extrapolated_with_its_first_step_counted_once() -> None:
    sync = extrapolated_sync([round_point(1, 9000), round_point(2, 4000), round_point(3, 6000)], 51)
    assert sync.at_ms == 9000 + 50 * 5000
    assert sync.how == (
        "extrapolated: 51 steps, the first 9.0 s and each other 5.0 s, as 2 took on average here"
    )
    assert extrapolated_sync([round_point(1, 9000)], 51).at_ms is None


def test_what_sync_takes_is_not_known_for_nodes_that_nobody_counted_it_with() -> None:
    train = TrainingRecorder()
    race = race_strategies(plan(4, is_short=True, worker="torch"), history(), train)
    assert [each.strategy for each in train.specs] == ["diloco"]
    assert (race[2].at_ms, sync_ratio(race)) == (None, None)
    assert "counted for another number of nodes" in race[2].how


class TrainingRecorder:
    """Remembers what was to be trained."""

    def __init__(self) -> None:
        self.specs: list[JobSpec] = []

    def __call__(self, spec: JobSpec, title: str) -> History:
        assert spec.strategy in title
        self.specs.append(spec)
        return history(round_point(1, 8000), round_point(2, 5000), at_ms=9000)


@pytest.mark.parametrize(("is_short", "rounds"), [(False, SYNC_ROUNDS), (True, SYNC_ROUNDS_SHORT)])
def test_diloco_is_trained_to_the_target_and_a_few_steps_of_sync(
    *, is_short: bool, rounds: int
) -> None:
    train = TrainingRecorder()
    demo_plan = plan(COUNTED_NODES, is_short=is_short, worker="torch")
    race = race_strategies(demo_plan, history(), train)
    diloco, sync = train.specs
    assert (diloco.strategy, diloco.evaluation.target) == ("diloco", demo_plan.target)
    assert (sync.strategy, sync.training.rounds, sync.codec.up) == ("sync", rounds, "fp32")
    assert [each.strategy for each in race] == ["aware", "diloco", "sync"]
    assert [each.at_ms for each in race] == [6000, 9000, 3000 + 5000 * demo_plan.sync_steps]


def test_a_fixed_demo_waits_for_everybody_and_plans_nothing() -> None:
    spec = plan(5, is_short=True, worker="torch", is_fixed=True).spec
    assert (spec.strategy, spec.round.deadline_ms, spec.round.quorum) == ("diloco", 0, 1.0)
    assert spec.pay.unit_price == 0


@pytest.mark.parametrize("worker", ["torch", "numpy"])
@pytest.mark.parametrize("kind", ["is_fixed", "is_attacked"])
def test_the_seed_alone_decides_the_models_of_demos_that_are_compared(
    worker: str, kind: str
) -> None:
    spec = plan(6, is_short=True, worker=worker, **{kind: True}).spec  # type: ignore[arg-type]
    assert (spec.strategy, spec.trust.duplicates) == ("diloco", "none")
    assert (spec.round.deadline_ms, spec.round.quorum) == (0, 1.0)
