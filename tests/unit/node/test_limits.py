"""A node owner's limits: read precisely, and decided upon without a machine."""

from pathlib import Path

import msgspec
import pytest

from gpu_node.__main__ import settings_of
from gpu_node.core import commands, events, limits, session_state
from gpu_node.core.limits import (
    HourSpan,
    LimitValueError,
    MachineReading,
    OwnerLimits,
    cause_of,
    is_used_by_others,
    owner_limits,
    refusal_of_disk,
    refusal_of_memory,
    refusal_of_work,
)
from gpu_node.core.session import transition
from gpu_node.shell.owner.limits_file import (
    check_coordinator,
    gpu_environment,
    load_limits,
    written_settings,
)
from hypergpu.assignment import FailureCause
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.units import Bytes, Milliseconds
from tests.unit.node.node_states import (
    ASSIGN,
    CONNECT,
    FETCH,
    WITHHOLD,
    after,
    at,
    lease,
    reach,
    states,
)

WHOLE = """
coordinators = ["train.example.org", "192.0.2.7:7701"]
workloads = ["digits-cnn", "numpy"]
disk = "50GB"
memory = "1.5 GB"
threads = 4
gpu = "none"
upload = "5Mbit/s"
download = "300 kbit/s"
hours = ["22:00-07:00", "12:00-13:30"]
only_when_idle = true
"""


def test_a_file_of_limits_is_read_and_flags_outweigh_it(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("\ufeff" + WHOLE, "utf-8")
    assert load_limits(tmp_path, ["disk=2TB", "threads=2"]) == OwnerLimits(
        coordinators=("train.example.org", "192.0.2.7:7701"),
        workloads=("digits-cnn", "numpy"),
        disk_bytes=Bytes(2 * 10**12),
        memory_bytes=Bytes(15 * 10**8),
        threads=2,
        gpu="none",
        upload_bits_per_s=5_000_000,
        download_bits_per_s=300_000,
        hours=(HourSpan(22 * 60, 7 * 60), HourSpan(12 * 60, 13 * 60 + 30)),
        only_when_idle=True,
    )


def test_without_a_file_and_flags_nothing_is_limited(tmp_path: Path) -> None:
    assert load_limits(tmp_path, ()) == OwnerLimits()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("disc = 5", "disc is no limit; there are coordinators, workloads, kinds, disk"),
        ("disk = 50", r'disk is 50; it must be a size above zero, such as "50GB"'),
        ('disk = "50"', "disk is '50'; it must be a size"),
        ('disk = "0GB"', "it must be a size above zero"),
        (f'disk = "{"9" * 400}GB"', "disk is '9+; it must be a size"),
        ("threads = true", "threads is True; it must be a whole number of at least 1"),
        ("threads = 0", "threads is 0; it must be a whole number"),
        ('upload = "64kbit/s"', "upload is '64kbit/s'; it must be a rate of at least 256 kbit/s"),
        ('hours = "22-7"', 'hours is .* must be spans of local time, such as "22:00-07:00"'),
        ('hours = "24:00-07:00"', "must be spans of local time"),
        ('hours = "07:00-07:00"', "must be spans of local time"),
        ("hours = []", "must be spans of local time"),
        ('only_when_idle = "yes"', "it must be true or false"),
        ("workloads = [1]", "it must be a list of names"),
        ('gpu = "first"', "it must be GPUs' indices or UUIDs"),
        ("disk = ", "node.toml: "),
    ],
)
def test_a_wrong_limit_is_named_with_what_is_right(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(HyperGPUError, match=said) as wrong:
        load_limits(tmp_path, ())
    assert wrong.value.reason is Reason.ARGUMENT_INVALID
    assert len(wrong.value.detail) < 500


@pytest.mark.parametrize(
    ("word", "said"),
    [("disk", "--limit 'disk' is no KEY=VALUE"), ("disc=1GB", "--limit: disc is no limit")],
)
def test_a_wrong_flag_is_named(tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises(HyperGPUError, match=said):
        load_limits(tmp_path, [word])


def test_a_gpu_or_a_power_limit_that_nobody_knows_is_an_error_at_the_start(tmp_path: Path) -> None:
    for word in ("gpu=99", "power=200"):
        with pytest.raises(HyperGPUError, match="nvidia-smi"):
            load_limits(tmp_path, [word])


def test_a_file_that_is_too_long_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("#" * 70_000)
    with pytest.raises(HyperGPUError, match="larger than 64 KiB"):
        load_limits(tmp_path, ())


def test_the_file_by_its_former_name_is_an_error_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "limits.toml").write_text(WHOLE)
    with pytest.raises(HyperGPUError, match="no longer read") as failure:
        load_limits(tmp_path, ())
    assert failure.value.fix == f"mv {tmp_path}/limits.toml {tmp_path}/node.toml"


def test_settings_stand_in_the_same_file_and_are_no_limits(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('threads = 3\n[settings]\nname = "attic"\n')
    assert load_limits(tmp_path, ()).threads == 3
    assert written_settings(tmp_path) == {"name": "attic"}
    (tmp_path / "node.toml").write_text("settings = 3")
    with pytest.raises(HyperGPUError, match="a table of settings"):
        written_settings(tmp_path)


def test_flags_and_variables_outweigh_the_settings_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'name = "attic"\nsandbox = "off"\nworker = "numpy"\nlog_level = "debug"'
    (tmp_path / "node.toml").write_text(f"[settings]\n{text}\n")
    monkeypatch.setenv("HYPERGPU_NODE_SANDBOX", "landlock")
    node_settings = settings_of(state_dir=tmp_path, worker="null")
    assert (node_settings.name, node_settings.sandbox, node_settings.worker) == (
        "attic",
        "landlock",
        "null",
    )
    (tmp_path / "node.toml").write_text("[settings]\nwheel = 4\n")
    with pytest.raises(HyperGPUError, match="wheel"):
        settings_of(state_dir=tmp_path)


def test_only_the_owners_coordinators_are_served() -> None:
    mine = OwnerLimits(coordinators=("train.example.org", "192.0.2.7:7701", "ab" * 32))
    check_coordinator(OwnerLimits(), "anywhere:7700", "")
    check_coordinator(mine, "train.example.org:9999", "")
    check_coordinator(mine, "192.0.2.7:7701", "")
    check_coordinator(mine, "moved.example.org:7701", "ab" * 32)
    with pytest.raises(HyperGPUError, match=r"OWNER_COORDINATOR \(7101\): 192.0.2.7:7702"):
        check_coordinator(mine, "192.0.2.7:7702", "cd" * 32)


def test_workloads_are_allowed_by_name_or_kind() -> None:
    kinds = {"digits-softmax": "numpy", "digits-cnn": "torch"}
    assert OwnerLimits().allow_workload("unknown", {})
    assert OwnerLimits(workloads=("numpy",)).allow_workload("digits-softmax", kinds)
    assert not OwnerLimits(workloads=("numpy",)).allow_workload("digits-cnn", kinds)
    assert OwnerLimits(workloads=("digits-cnn",)).allow_workload("digits-cnn", {})


def test_programs_run_without_a_sandbox_only_where_the_owner_names_them() -> None:
    assert OwnerLimits().allow_unsandboxed("digits-cnn")
    assert not OwnerLimits(workloads=("torch",)).allow_unsandboxed("program")
    assert OwnerLimits(workloads=("program",)).allow_unsandboxed("program")
    assert not OwnerLimits().allow_unsandboxed("map/program")
    assert OwnerLimits().allow_unsandboxed("map/embed")


def reading(minute: int = 0, at_ms: int = 0, power_w: float = 0.0) -> MachineReading:
    return MachineReading(Milliseconds(at_ms), minute, power_w=power_w)


@pytest.mark.parametrize(
    ("minute", "is_allowed"),
    [(21 * 60 + 59, False), (22 * 60, True), (0, True), (6 * 60 + 59, True), (7 * 60, False)],
)
def test_hours_may_go_over_midnight(minute: int, *, is_allowed: bool) -> None:
    night = owner_limits({"hours": "22:00-07:00"}, "test")
    refusal = refusal_of_work(night, reading(minute), None)
    assert (refusal is None) == is_allowed
    if refusal is not None:
        assert refusal == ("OWNER_HOURS", "its owner lets it work at 22:00-07:00 only")


def test_a_gpu_set_above_the_owners_power_is_not_trained_on() -> None:
    owner = OwnerLimits(power_w=250)
    assert refusal_of_work(owner, reading(power_w=250.0), None) is None
    refusal = refusal_of_work(owner, reading(power_w=300.0), None)
    assert refusal == ("OWNER_POWER", "the GPU may take 300 W, its owner allows 250 W")


def test_a_used_machine_is_left_alone_for_a_minute() -> None:
    owner = OwnerLimits(only_when_idle=True)
    used_machine = reading()._replace(others_share=limits.OTHERS_SHARE_MAX + 0.01)
    assert is_used_by_others(used_machine)
    assert is_used_by_others(reading()._replace(is_gpu_shared=True))
    assert not is_used_by_others(reading()._replace(others_share=limits.OTHERS_SHARE_MAX))
    busy_ms = Milliseconds(1_000)
    assert refusal_of_work(owner, reading(at_ms=60_999), busy_ms) is not None
    assert refusal_of_work(owner, reading(at_ms=61_000), busy_ms) is None
    assert refusal_of_work(owner, reading(), None) is None
    assert refusal_of_work(OwnerLimits(), reading(at_ms=1_000), busy_ms) is None


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    owner = OwnerLimits(memory_bytes=Bytes(399), disk_bytes=Bytes(1000))
    assert refusal_of_memory(owner, 99) is None
    refusal = refusal_of_memory(owner, 100)
    assert refusal is not None
    assert refusal.detail == "training takes 400 bytes of memory at least, its owner allows 399"
    assert refusal_of_disk(owner, 300, 700) is None
    assert refusal_of_disk(owner, 301, 700) is not None
    assert refusal_of_disk(OwnerLimits(), 10**15, 10**15) is None


def test_a_worker_sees_the_owners_gpu_alone() -> None:
    assert gpu_environment(OwnerLimits()) == {}
    assert gpu_environment(OwnerLimits(gpu="1"))["CUDA_VISIBLE_DEVICES"] == "1"
    assert gpu_environment(OwnerLimits(gpu="none"))["CUDA_VISIBLE_DEVICES"] == ""


def test_training_ends_when_the_owners_hours_do_and_says_so() -> None:
    step = transition(states()["training"], WITHHOLD)
    assert commands.AnnounceDraining("hours") in step.commands
    assert commands.EndWorker("hours", FailureCause.OWNER) in step.commands
    assert commands.HandBack(lease(), "hours", FailureCause.OWNER) in step.commands


def test_a_finished_update_is_sent_all_the_same() -> None:
    session = states()["uploading, withheld"]
    assert isinstance(session.work, session_state.Uploading)


def test_work_that_is_assigned_meanwhile_is_handed_back() -> None:
    step = after(reach(*CONNECT, WITHHOLD), [ASSIGN])
    assert commands.HandBack(lease(), "hours", FailureCause.OWNER) in step.commands


def test_a_node_that_connects_outside_its_hours_says_so_at_once() -> None:
    session = reach(*CONNECT[:1], WITHHOLD)
    step = transition(session, CONNECT[1])
    assert step.commands == (commands.AnnounceDraining("hours"),)


def test_a_node_greets_anew_once_it_may_work_again() -> None:
    step = transition(
        reach(*CONNECT, WITHHOLD), events.AvailabilityChanged(at_ms=at(50), reason="")
    )
    assert step.commands == (commands.OpenLink(()),)


@pytest.mark.parametrize("cause", [FailureCause.OUT_OF_MEMORY, FailureCause.OWNER])
def test_a_worker_that_broke_a_limit_is_not_started_again_for_the_shard(
    cause: FailureCause,
) -> None:
    session = reach(*CONNECT, ASSIGN, FETCH)
    step = transition(session, events.WorkerDied(at_ms=at(40), reason="9 bytes", cause=cause))
    assert step.commands == (commands.HandBack(lease(), "9 bytes", cause),)


@pytest.mark.parametrize("reason", ["out of memory: it took 9", "OWNER_DISK (7103): 9 bytes"])
def test_the_text_of_a_workers_death_decides_nothing(reason: str) -> None:
    session = reach(*CONNECT, ASSIGN, FETCH)
    step = transition(session, events.WorkerDied(at_ms=at(40), reason=reason))
    assert not any(isinstance(command, commands.HandBack) for command in step.commands)
    assert step.session.worker.retry_at_ms > 0


def test_work_that_the_owner_forbids_is_handed_back_for_that_cause() -> None:
    event = events.FetchRejected(
        at_ms=at(40), lease=lease(), reason="no folder", cause=FailureCause.OWNER
    )
    step = transition(reach(*CONNECT, ASSIGN), event)
    assert step.commands[-1] == commands.HandBack(lease(), "no folder", FailureCause.OWNER)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (Reason.OWNER_DISK, FailureCause.OWNER),
        (Reason.OWNER_COORDINATOR, FailureCause.OWNER),
        (Reason.NODE_STOPPED, FailureCause.OTHER),
        (Reason.CHAIN_UNREACHABLE, FailureCause.OTHER),
    ],
)
def test_a_numbered_error_of_the_owners_limits_is_the_owners_cause(
    reason: Reason, cause: FailureCause
) -> None:
    assert cause_of(reason) is cause


def test_a_value_error_names_its_origin() -> None:
    with pytest.raises(LimitValueError, match=r"^here: disk is"):
        owner_limits({"disk": []}, "here")


def test_a_kind_is_done_only_where_its_owner_names_it(tmp_path: Path) -> None:
    limits = OwnerLimits()
    assert not limits.refusal_of_kind("training")
    refusal = limits.refusal_of_kind("map/embed")
    assert refusal.endswith('kinds = ["training", "embed"]')
    # The line that the refusal names is one that the file takes.
    (tmp_path / "node.toml").write_text(refusal.rpartition(": ")[2])
    wider_limits = load_limits(tmp_path, [])
    assert wider_limits.kinds == ("training", "embed")
    assert not wider_limits.refusal_of_kind("map/embed")
    assert wider_limits.refusal_of_kind("map/score")


def test_a_node_holds_no_model_unless_its_owner_allows_it() -> None:
    limits = OwnerLimits()
    refusal = limits.refusal_of_kind("serve/transformers")
    assert refusal.endswith('kinds = ["training", "serve"]')
    allowing_limits = msgspec.structs.replace(limits, kinds=("training", "serve"))
    assert not allowing_limits.refusal_of_kind("serve/transformers")
    assert allowing_limits.refusal_of_kind("map/embed")
