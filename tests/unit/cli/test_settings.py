"""Who decides a setting: flag, environment, file, `up`, default."""

from pathlib import Path

import pytest

from hypergpu.client.settings import ResolvedSetting, chain_meant, resolve_settings, timeout_s
from hypergpu.errors import HyperGPUError, Reason
from tests.unit.cli.conftest import Hypergpu


def write_file(tmp_path: Path, name: str, text: str) -> None:
    folder = tmp_path / "config" / "hypergpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, "utf-8")


def row_of(output: str, name: str) -> list[str]:
    return next(line.split() for line in output.splitlines() if line.startswith(name + " "))


def test_environment_wins_over_the_file(alone: Hypergpu, tmp_path: Path) -> None:
    write_file(tmp_path, "config.toml", "timeout_s = 7\n")
    ended = alone("config", "show", "--origin", HYPERGPU_TIMEOUT_S="9")
    assert row_of(ended.stdout, "timeout_s")[1::2] == ["9", "env"]


def test_flag_wins_over_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HYPERGPU_ADDRESS", "b:1")
    assert resolve_settings({"address": "a:1"})["address"] == ResolvedSetting("a:1", "flag")


@pytest.mark.parametrize(
    ("environment", "flags", "meant"),
    [
        ({"CHAIN": "http://a"}, {"chain_url": "http://b"}, "http://b"),
        ({"CHAIN": "http://a", "COORDINATOR_CHAIN_URL": "http://b"}, {}, "http://b"),
        ({"COORDINATOR_CHAIN_URL": "http://b"}, {"chain": "http://a"}, ""),
        ({"COORDINATOR_CHAIN_URL": "http://b"}, {"chain": "base-sepolia"}, "http://b"),
        ({"COORDINATOR_CHAIN_URL": "http://b"}, {"chain_url": "http://c"}, "http://c"),
        ({"CHAIN": "http://a"}, {}, ""),
    ],
)
def test_of_two_addresses_of_an_rpc_the_one_of_the_stronger_origin_counts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    environment: dict[str, str],
    flags: dict[str, str],
    meant: str,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("CHAIN", "COORDINATOR_CHAIN_URL"):
        monkeypatch.setenv(f"HYPERGPU_{name}", environment.get(name, ""))
    found = resolve_settings(flags)
    assert chain_meant(found) == (found["chain"].value, meant)


def test_file_wins_over_what_up_left(alone: Hypergpu, tmp_path: Path) -> None:
    write_file(tmp_path, "up.toml", 'token_file = "/from/up"\naddress = "127.0.0.1:1"\n')
    write_file(tmp_path, "config.toml", 'token_file = "/from/file"\n')
    shown = alone("config", "show", "--origin").stdout
    assert row_of(shown, "token_file")[1] == "/from/file"


def test_address_of_up_is_for_the_token_of_up_only(alone: Hypergpu, tmp_path: Path) -> None:
    write_file(tmp_path, "up.toml", 'token_file = "/from/up"\naddress = "127.0.0.1:1"\n')
    assert row_of(alone("config", "show").stdout, "address")[1] == "127.0.0.1:1"
    foreign = alone("config", "show", HYPERGPU_TOKEN_FILE="/mine")
    assert row_of(foreign.stdout, "address")[1] == "-"


def test_unknown_setting_in_the_file_is_an_error(alone: Hypergpu, tmp_path: Path) -> None:
    write_file(tmp_path, "config.toml", 'adress = "x:1"\n')
    ended = alone("config", "show")
    assert ended.exit_code == Reason.FILE_UNUSABLE.exit_code
    assert "no setting 'adress'" in ended.stderr


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
def test_deadline_of_calls_must_be_a_time(value: str) -> None:
    with pytest.raises(HyperGPUError, match="not a number of seconds"):
        timeout_s({"timeout_s": ResolvedSetting(value, "env")})
