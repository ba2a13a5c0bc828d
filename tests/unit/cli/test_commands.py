"""Each command against a service that answers or refuses; settings, exports, a watch."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.part_file import DigestingPartFile
from hypergpu.tensors.layout import Flat, unpack
from hypergpu.units import Bytes
from hypergpu.user.client import ConnectionTarget, Coordinator, JobEvent
from hypergpu.user.client.settings import ResolvedSetting, chain_meant, resolve_settings, timeout_s
from hypergpu.user.terminal.watch import JobProgress, PlainView, Watched, follow
from hypergpu.wire.credentials import parse_token
from tests.unit.cli import fake_service
from tests.unit.cli.conftest import Hypergpu
from tests.unit.cli.fake_service import (
    EVENTS,
    JOB,
    LAYOUT,
    MODEL,
    NODE,
    SECRET,
    FakeService,
    operator_token,
    serving,
)

GOLDEN = Path(__file__).parents[2] / "vectors" / "cli"
ON_LOOPBACK = 'workload = "digits-softmax"\nname = "first"\n'

READS = {
    "jobs": ["job", "ls"],
    "job": ["job", "show", "first"],
    "events": ["job", "watch"],
    "nodes": ["node", "ls"],
    "node": ["node", "show", "attic"],
    "tokens": ["token", "ls"],
    "token": ["token", "create"],
}


@pytest.mark.parametrize("name", READS)
def test_json_is_what_was_promised(name: str, hypergpu: Hypergpu) -> None:
    result = hypergpu(*READS[name], "--json")
    assert result.exit_code == 0, result.output
    lines = result.stdout.strip().splitlines()
    answer = [json.loads(line) for line in lines] if name == "events" else json.loads(result.stdout)
    assert answer == json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", READS)
def test_pipe_gets_plain_text(name: str, hypergpu: Hypergpu) -> None:
    result = hypergpu(*READS[name])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    assert "\x1b" not in result.stdout


def test_a_node_is_shown_with_the_spread_and_age_of_each_figure(hypergpu: Hypergpu) -> None:
    lines = hypergpu("node", "show", NODE[:8]).stdout.splitlines()
    assert "  health      0.83 high: speed 0.75 lowers it most" in lines
    assert "  parts       speed 0.75, reliability 0.90, quality 0.85, uptime 0.95" in lines
    assert "  last day    ▁▅ ▇" in lines
    assert "  plan        H=20, int4, uplink 6 Mbit/s" in lines
    figures = {line.split("  ")[0]: line.split("  ") for line in lines if line.endswith("ago")}
    cells_by_name = {name: [cell.strip() for cell in row if cell] for name, row in figures.items()}
    assert cells_by_name["round trip"] == ["round trip", "52 ms", "2.5 ms", "12", "0.8 s ago"]
    assert cells_by_name["up Mbit/s"] == ["up Mbit/s", "6", "0.5", "3", "4.0 s ago"]
    assert cells_by_name["loss"] == ["loss", "1.2 %", "0.5 %", "80", "9.0 s ago"]


def test_no_jobs_say_how_to_make_one(service: FakeService, hypergpu: Hypergpu) -> None:
    service.jobs = []
    assert hypergpu("job", "ls").stdout == (
        "no jobs yet; submit one: hypergpu job submit FILE.toml\n"
    )


def test_watch_tells_rounds_evaluations_and_losses_of_nodes(hypergpu: Hypergpu) -> None:
    result = hypergpu("job", "watch")
    assert "round 1/4  loss 0.2500  1 of 1 updates  1.2 kB up  2.4 kB down  1.5 s" in result.stdout
    assert "after 1 round: accuracy 0.9000, held-out loss 0.5000" in result.stdout
    assert "attic was lost: not heard of for 15 s" in result.stdout
    assert result.exit_code == 0


def test_watch_goes_on_where_the_stream_broke(service: FakeService, hypergpu: Hypergpu) -> None:
    service.breaks_left = 1
    result = hypergpu("job", "watch", "--json")
    sequences = [json.loads(line)["sequence"] for line in result.stdout.splitlines()]
    assert sequences == [0, 1, 2, 3, 4]
    assert service.offsets[:2] == [0, 2]


def test_watching_a_failed_job_fails(service: FakeService, hypergpu: Hypergpu) -> None:
    service.called.append("failing")
    result = hypergpu("job", "watch")
    assert result.exit_code == Reason.JOB_UNSUCCESSFUL.exit_code
    assert f"error 6008: {JOB} failed" in result.stderr


def test_estimate_is_told_and_creates_no_job(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(ON_LOOPBACK)
    result = hypergpu("job", "submit", str(file), "--estimate")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "time      about 4 min 10 s (3 min 20 s to 6 min 40 s)\n"
        "traffic   about 12 kB (10 kB to 20 kB) up, 1.5 MB (1 MB to 2 MB) down\n"
        "work      20,480 samples in about 38 rounds, 5 nodes\n"
        f"cost      about 12 (11 to {10**25}) of an escrow of {10**25}\n"
        "based on  3 of 5 nodes are measured, 2 by the median\n"
    )
    as_json = hypergpu("job", "submit", str(file), "--estimate", "--json")
    assert json.loads(as_json.stdout) == json.loads((GOLDEN / "forecast.json").read_text("utf-8"))
    assert "CreateJob" not in " ".join(service.called)
    assert hypergpu("job", "submit", str(file), "--estimate", "--watch").exit_code == 2


def test_submit_sends_the_validated_file_and_prints_the_job(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(ON_LOOPBACK, "utf-8")
    result = hypergpu("job", "submit", str(file))
    assert result.stdout == f"{JOB}\n"
    assert msgspec.json.decode(service.specs[0])["workload"] == "digits-softmax"


def test_wrong_job_file_reaches_nobody_and_says_every_problem(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text('workload = "digits-softmax"\nnme = 1\n[training]\nrounds = 0\n', "utf-8")
    result = hypergpu("job", "submit", str(file))
    assert result.exit_code == Reason.SPEC_INVALID.exit_code
    assert result.stderr.splitlines() == [
        f"error 2002: {file}:2 nme: there is no key nme here. Fix: did you mean name?",
        (
            f"error 2002: {file}:4 [training] rounds: 0 is outside [1, 1000000]."
            " Fix: choose a value in [1, 1000000]"
        ),
    ]
    assert service.called == []


def test_data_is_uploaded_once_and_from_where_it_broke(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    (tmp_path / "words" / ".git").mkdir(parents=True)
    (tmp_path / "words" / ".git" / "config").write_text("secret", "utf-8")
    (tmp_path / "words" / "b.txt").write_bytes(b"b" * 700_000)
    (tmp_path / "words" / "a.txt").write_bytes(b"b" * 700_000)
    file = tmp_path / "job.toml"
    file.write_text('workload = "text-gpt"\n[data]\npath = "words"\n', "utf-8")
    service.breaks_left = 1
    result = hypergpu("job", "submit", str(file))
    assert result.exit_code == 0, result.stderr
    assert [bytes(blob) for blob in service.blobs.values()] == [b"b" * 700_000]
    assert service.offsets == [0, fake_service.CHUNK]
    assert [entry.path for entry in service.manifests[0].entries] == ["a.txt", "b.txt"]


def test_set_checks_here_and_sends_dotted_keys(service: FakeService, hypergpu: Hypergpu) -> None:
    result = hypergpu("job", "set", "first", "lr=0.5", "deadline=60s")
    assert result.exit_code == 0, result.stderr
    call_text = "SetParameters [('inner.learning_rate', '0.5'), ('round.deadline', '\"60s\"')]"
    assert call_text in service.called


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (["job", "pause", "first"], f"PauseJob {JOB}"),
        (["job", "pause", "0123"], f"PauseJob {JOB}"),
        (["job", "pause"], f"PauseJob {JOB}"),
        (["job", "stop", "--yes"], f"StopJob {JOB}"),
        (["job", "rm", "first", "--yes"], f"RemoveJob {JOB}"),
        (["node", "pause", "attic"], f"PauseNode {NODE}"),
        (["node", "label", "attic", "home", "ours"], f"LabelNode {NODE} home ours"),
        (["node", "resume", "attic"], f"ResumeNode {NODE}"),
        (["node", "drain", "ABab"], f"DrainNode {NODE}"),
        (["node", "drain", "attic"], f"DrainNode {NODE}"),
        (["node", "revoke", "ABab"], f"RevokeNode {NODE}"),
        (["node", "readmit", NODE], f"ReadmitNode {NODE}"),
        (["token", "create", "--ttl", "5m", "--nodes", "2"], "CreateToken 1 300 2"),
        (["token", "create"], "CreateToken 1 86400 8"),
        (["token", "create", "--role", "user"], "CreateToken 2 86400 0"),
    ],
)
def test_command_asks_for_what_was_meant(
    words: list[str], call: str, service: FakeService, hypergpu: Hypergpu
) -> None:
    result = hypergpu(*words)
    assert result.exit_code == 0, result.stderr
    assert call in service.called


@pytest.mark.parametrize("words", [["job", "stop"], ["job", "rm", "first"]])
def test_destruction_needs_a_yes_where_nobody_can_be_asked(
    words: list[str], service: FakeService, hypergpu: Hypergpu
) -> None:
    result = hypergpu(*words)
    assert result.exit_code == 2
    assert result.stderr.endswith("? Nobody is there to answer. Fix: answer beforehand: --yes\n")
    assert not any(call.startswith(("StopJob", "RemoveJob")) for call in service.called)


def test_join_line_is_the_whole_result(hypergpu: Hypergpu) -> None:
    result = hypergpu("token", "create")
    assert result.stdout == "hypergpu join hgpu1.made\n"
    assert "hypergpu token revoke 111111111111" in result.stderr


def test_refusal_ends_in_its_number_detail_fix_and_exit_status(hypergpu: Hypergpu) -> None:
    result = hypergpu("job", "resume")
    assert result.exit_code == 12
    assert result.stderr == "error 2003: the job is not paused. Fix: do as the test says\n"


def test_a_job_that_is_paused_again_at_once_does_not_go_on(
    hypergpu: Hypergpu, service: FakeService
) -> None:
    service.jobs[0].phase, service.jobs[0].reason = "paused", "its escrow is too small"
    result = hypergpu("job", "resume")
    assert (result.exit_code, result.stdout) == (12, "")
    assert f"{service.jobs[0].job_id} is paused again at once: its escrow is too" in result.stderr


def test_reason_of_a_newer_coordinator_keeps_its_number_and_fix(hypergpu: Hypergpu) -> None:
    result = hypergpu("token", "revoke", "1" * 12)
    assert result.exit_code == 19
    assert result.stderr == "error 9001: no such thing. Fix: do as the test says\n"


def test_token_goes_by_the_beginning_of_its_id(hypergpu: Hypergpu) -> None:
    # The service lists one token of ones and refuses to revoke it.
    assert "error 9001" in hypergpu("token", "revoke", "111").stderr
    result = hypergpu("token", "revoke", "2")
    assert result.stderr.startswith("error 5003: there is no token '2'.")


def test_token_in_use_is_not_revoked_by_accident(service: FakeService, hypergpu: Hypergpu) -> None:
    service.token_id = "0" * 12
    result = hypergpu("token", "revoke", "0")
    assert result.exit_code == 2
    assert "the token of this very command? Nobody is there to answer" in result.stderr
    assert "error 9001" in hypergpu("token", "revoke", "0", "--yes").stderr


@pytest.mark.parametrize(
    ("words", "variables", "line"),
    [
        (
            ["join"],
            {},
            "there is no token, and this machine has not joined before. Fix: paste the whole join",
        ),
        (
            ["job", "ls"],
            {"HYPERGPU_TIMEOUT_S": "soon"},
            (
                "timeout_s is 'soon' (from env), not a number of seconds."
                " Fix: give seconds, for example HYPERGPU_TIMEOUT_S=60"
            ),
        ),
        (["jb"], {}, "No such command 'jb'. Did you mean 'job'? Fix: see hypergpu --help"),
    ],
)
def test_wrong_usage_has_one_status_and_the_fix_that_helps(
    words: list[str], variables: dict[str, str], line: str, hypergpu: Hypergpu
) -> None:
    result = hypergpu(*words, **variables)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error 6002: {line}")


@pytest.mark.parametrize("quoted", ["hypergpu join hgpu1.cut", "hgpu1.cut"])
def test_cut_token_says_to_paste_the_whole_line(quoted: str, alone: Hypergpu) -> None:
    result = alone("join", quoted)
    assert result.exit_code == Reason.TOKEN_INVALID.exit_code
    assert result.stderr.startswith(
        "error 1101: the token was cut off or altered. Fix: paste the whole line"
    )


def test_calls_carry_the_token_and_output_never_does(
    service: FakeService, hypergpu: Hypergpu
) -> None:
    results = [hypergpu("job", "ls"), hypergpu("env"), hypergpu("config", "show")]
    assert service.authorizations == {f"Bearer {'0' * 12}.{SECRET}"}
    assert not any(SECRET in each.output or "hgpu1." in each.output for each in results)


def test_no_coordinator_known_says_how_to_get_one(alone: Hypergpu) -> None:
    result = alone("job", "ls")
    assert result.exit_code == Reason.COORDINATOR_UNNAMED.exit_code
    assert result.stderr.startswith("error 6001: no coordinator is known")


def test_nobody_listening_is_told_at_once(alone: Hypergpu) -> None:
    result = alone("job", "ls", HYPERGPU_TOKEN=operator_token(1))
    assert result.exit_code == Reason.COORDINATOR_UNREACHABLE.exit_code
    assert "no coordinator listens at 127.0.0.1:1: Connection refused" in result.stderr


def test_token_without_a_ca_is_good_on_loopback_only(alone: Hypergpu) -> None:
    with serving(FakeService()) as port:
        result = alone(
            "job",
            "ls",
            "--address",
            f"0.0.0.0:{port}",
            HYPERGPU_TOKEN=operator_token(port),
        )
    assert result.exit_code == Reason.AUTHORITY_MISMATCH.exit_code


def test_group_without_a_command_shows_its_help(alone: Hypergpu) -> None:
    result = alone("job")
    assert result.exit_code == 2
    assert "Usage: hypergpu job [OPTIONS] COMMAND" in result.stdout


def write_file(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "config" / "hypergpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, "utf-8")


def row_of(output: str, name: str) -> list[str]:
    return next(line.split() for line in output.splitlines() if line.startswith(name + " "))


def test_environment_wins_over_the_file(alone: Hypergpu, tmp_path: Path) -> None:
    write_file(tmp_path, "config.toml", "timeout_s = 7\n")
    result = alone("config", "show", "--origin", HYPERGPU_TIMEOUT_S="9")
    assert row_of(result.stdout, "timeout_s")[1::2] == ["9", "env"]


def test_flag_wins_over_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HYPERGPU_ADDRESS", "b:1")
    assert resolve_settings({"address": "a:1"})["address"] == ResolvedSetting("a:1", "flag")


@pytest.mark.parametrize(
    ("chain", "rpc", "meant"),
    [
        (("http://a", "env"), ("http://b", "flag"), "http://b"),
        (("http://a", "env"), ("http://b", "env"), "http://b"),
        (("http://a", "flag"), ("http://b", "env"), ""),
        (("base-sepolia", "flag"), ("http://b", "env"), "http://b"),
        (("none", "default"), ("http://c", "flag"), "http://c"),
        (("http://a", "env"), ("", "default"), ""),
    ],
)
def test_of_two_addresses_of_an_rpc_the_one_of_the_stronger_origin_counts(
    chain: tuple[str, str], rpc: tuple[str, str], meant: str
) -> None:
    settings = {"chain": ResolvedSetting(*chain), "chain_url": ResolvedSetting(*rpc)}
    assert chain_meant(settings) == (chain[0], meant)


def test_file_wins_over_what_up_left(alone: Hypergpu, tmp_path: Path) -> None:
    write_file(tmp_path, "up.toml", 'token_file = "/from/up"\naddress = "127.0.0.1:1"\n')
    write_file(tmp_path, "config.toml", 'token_file = "/from/file"\n')
    output_text = alone("config", "show", "--origin").stdout
    assert row_of(output_text, "token_file")[1] == "/from/file"


def test_address_of_up_is_for_the_token_of_up_only(alone: Hypergpu, tmp_path: Path) -> None:
    write_file(tmp_path, "up.toml", 'token_file = "/from/up"\naddress = "127.0.0.1:1"\n')
    assert row_of(alone("config", "show").stdout, "address")[1] == "127.0.0.1:1"
    foreign = alone("config", "show", HYPERGPU_TOKEN_FILE="/mine")
    assert row_of(foreign.stdout, "address")[1] == "-"


def test_unknown_setting_in_the_file_is_an_error(alone: Hypergpu, tmp_path: Path) -> None:
    write_file(tmp_path, "config.toml", 'adress = "x:1"\n')
    result = alone("config", "show")
    assert result.exit_code == Reason.FILE_UNUSABLE.exit_code
    assert "no setting 'adress'" in result.stderr


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
def test_deadline_of_calls_must_be_a_time(value: str) -> None:
    with pytest.raises(HyperGPUError, match="not a number of seconds"):
        timeout_s({"timeout_s": ResolvedSetting(value, "env")})


def test_safetensors_hold_the_models_tensors_bit_for_bit(
    hypergpu: Hypergpu, tmp_path: Path
) -> None:
    result = hypergpu("job", "export", "--out", str(tmp_path / "model"))
    assert result.exit_code == 0, result.stderr
    loaded_tensors = load_file(tmp_path / "model" / "model.safetensors")
    expected_tensors = unpack(LAYOUT, Flat.view(LAYOUT, np.frombuffer(MODEL, np.uint8)))
    assert set(loaded_tensors) == set(expected_tensors)
    for name, tensor in expected_tensors.items():
        assert loaded_tensors[name].dtype == tensor.dtype
        assert loaded_tensors[name].shape == tensor.shape
        assert loaded_tensors[name].tobytes() == tensor.tobytes()


def test_broken_transfer_goes_on_where_it_was(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    service.breaks_left = 2
    result = hypergpu("job", "export", "--out", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert service.offsets == [0, fake_service.CHUNK, 2 * fake_service.CHUNK]


def keep_part(folder: Path, content: bytes) -> None:
    """Leave what an export that was broken off had of the model."""
    part = DigestingPartFile(folder / f".{JOB}-latest.part", Bytes(len(MODEL)))
    part.write(0, content)
    part.close()


def test_part_of_an_earlier_command_is_used(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    digest = service.jobs[0].model.value.hex()
    keep_part(tmp_path, MODEL[:300])
    (tmp_path / f".{JOB}-latest.digest").write_text(digest, "ascii")
    result = hypergpu("job", "export", "--out", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert service.offsets == [300]


def test_a_model_that_arrives_damaged_is_fetched_again(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    digest = service.jobs[0].model.value.hex()
    keep_part(tmp_path, b"x" * 300)
    (tmp_path / f".{JOB}-latest.digest").write_text(digest, "ascii")
    assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 0
    assert service.doubts == 1


def test_a_model_that_stays_damaged_is_refused_and_not_written(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    service.model = bytes(len(service.model))
    result = hypergpu("job", "export", "--out", str(tmp_path))
    assert result.exit_code == Reason.DIGEST_MISMATCH.exit_code
    assert not (tmp_path / "model.safetensors").exists()
    assert service.doubts == 1


@pytest.mark.parametrize(("flags", "which"), [([], "latest"), (["--best"], "best")])
def test_which_model_is_the_callers_choice(
    flags: list[str], which: str, service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    hypergpu("job", "export", "--out", str(tmp_path), *flags)
    assert f"ResolveModel {which}" in service.called


def test_export_again_replaces_what_the_former_one_left(hypergpu: Hypergpu, tmp_path: Path) -> None:
    for _ in range(2):
        assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 0


@pytest.mark.parametrize("name", ["README.md", "model.safetensors"])
def test_files_of_others_are_not_written_over(
    name: str, service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    (tmp_path / name).write_text("mine", "utf-8")
    result = hypergpu("job", "export", "--out", str(tmp_path))
    assert result.exit_code == Reason.FILE_PRESENT.exit_code
    assert result.stderr.startswith(f"error 6009: {tmp_path / name} is there already")
    assert (tmp_path / name).read_text("utf-8") == "mine"
    assert service.offsets == []
    assert hypergpu("job", "export", "--out", str(tmp_path), "--overwrite").exit_code == 0


def test_model_of_another_job_is_not_written_over(
    service: FakeService, hypergpu: Hypergpu, tmp_path: Path
) -> None:
    assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 0
    service.jobs[0].job_id = "job-ffffffffffff"
    result = hypergpu("job", "export", "--out", str(tmp_path))
    assert f"is there already and is {JOB}'s model" in result.stderr


def test_card_that_was_edited_is_not_written_over(hypergpu: Hypergpu, tmp_path: Path) -> None:
    assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 0
    (tmp_path / "README.md").write_text("# first, with my notes\n", "utf-8")
    assert hypergpu("job", "export", "--out", str(tmp_path)).exit_code == 16


TICKS_MOST = 40


def test_absence_is_told_once_and_so_is_the_return(
    service: FakeService, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        serving(service) as port,
        Coordinator(
            ConnectionTarget(f"127.0.0.1:{port}", parse_token(operator_token(port)), 5.0)
        ) as there,
    ):
        job_watch = Watched(there, JOB, PlainView())
        lines: list[str] = []

        def tick_until(line: str) -> None:
            for _ in range(TICKS_MOST):
                job_watch.tick()
                lines.extend(capsys.readouterr().out.splitlines())
                if line in lines:
                    break

        service.is_away = True
        tick_until("  lost the coordinator, trying again")
        service.is_away = False
        tick_until("  the coordinator is back")
    assert lines.count("  lost the coordinator, trying again") == 1
    assert lines.count("  the coordinator is back") == 1


def test_a_watch_has_not_ended_before_every_event_was_shown(service: FakeService) -> None:
    sequences: list[int] = []

    class Recorder(PlainView):
        def event(self, event: JobEvent, progress: JobProgress) -> None:
            sequences.append(event.sequence)

    service.jobs[0].phase = "finished"
    with (
        serving(service) as port,
        Coordinator(
            ConnectionTarget(f"127.0.0.1:{port}", parse_token(operator_token(port)), 60.0)
        ) as there,
    ):
        follow(there, JOB, Recorder())
    assert sequences == list(range(len(EVENTS)))


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 400, "9" * 5000, "1e400", "nan"])
@pytest.mark.parametrize(
    "words",
    [
        ["up", "--port"],
        ["up", "--nodes"],
        ["token", "create", "--ttl"],
        ["token", "create", "--nodes"],
        ["demo", "--nodes"],
        ["compare", "job.toml", "--world", "home", "--sync-steps"],
        ["compare", "job.toml", "--world", "home", "--give-up-after"],
        ["ledger", "deploy", "--token"],
    ],
)
def test_number_that_no_option_takes_is_refused_in_one_line(
    words: list[str], number: str, hypergpu: Hypergpu
) -> None:
    result = hypergpu(*words[:-1], f"{words[-1]}={number}")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error 6002: ")
    assert " Fix: " in line
    assert len(line) < 400


def test_a_log_of_a_job_that_is_not_watched_is_refused(alone: Hypergpu) -> None:
    result = alone("job", "submit", "job.toml", "--log", "tensorboard:curves")
    assert result.exit_code == 2
    assert "add --watch, or log by job watch" in result.output
