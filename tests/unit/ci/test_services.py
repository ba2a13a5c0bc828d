"""The systemd units of `examples`."""

import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from coordinator.config import Settings
from gpu_node.config import NodeSettings
from hypergpu.user.cluster.cluster import wait_until_ready
from hypergpu.user.cluster.processes import kill_group, start

ROOT = Path(__file__).parents[3]
UNITS = sorted(ROOT.glob("examples/*.service"))


def values(unit: Path, key: str) -> list[str]:
    """Every value of a key, in order."""
    lines = unit.read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def test_there_is_a_unit_for_each_daemon() -> None:
    assert [unit.stem for unit in UNITS] == ["hypergpu-coordinator", "hypergpu-node"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_an_installed_program_with_settings_it_has(unit: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (start_command,) = values(unit, "ExecStart")
    assert Path(start_command.split()[0]).name in scripts
    known_variables = {
        settings.model_config["env_prefix"] + name.upper()
        for settings in (Settings, NodeSettings)
        for name in settings.model_fields
    }
    used_variables = {each.partition("=")[0] for each in values(unit, "Environment")}
    assert used_variables
    assert used_variables <= known_variables
    (folder,) = values(unit, "StateDirectory")
    assert any(each.endswith(f"=/var/lib/{folder}") for each in values(unit, "Environment"))
    assert values(unit, "User") == ["hypergpu"]


@pytest.fixture
def installed_units(tmp_path: Path) -> list[Path]:
    """The units with the programs of this environment in place of those in /opt."""
    programs = str(Path(sys.executable).parent)
    for unit in UNITS:
        text = unit.read_text("utf-8").replace("/opt/hypergpu/bin", programs)
        (tmp_path / unit.name).write_text(text, "utf-8")
    return sorted(tmp_path.glob("*.service"))


def test_systemd_takes_each_unit_as_it_is_written(installed_units: list[Path]) -> None:
    """Where systemd is: CI's machines need not have it."""
    if (verifier := shutil.which("systemd-analyze")) is None:
        return
    command = [verifier, "verify", *map(str, installed_units)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


def test_the_coordinators_unit_starts_it_and_ends_it_in_good_order(
    installed_units: list[Path], tmp_path: Path
) -> None:
    """Without systemd: its command with its variables, its folders elsewhere and free ports."""
    unit = installed_units[0]
    passphrase = tmp_path / "coordinator.passphrase"
    passphrase.write_text("a passphrase of some length\n")
    passphrase.chmod(0o600)
    variables = dict(each.split("=", 1) for each in values(unit, "Environment"))
    variables["HYPERGPU_COORDINATOR_DATA_DIR"] = str(tmp_path / "coordinator")
    variables["HYPERGPU_COORDINATOR_PASSPHRASE_FILE"] = str(passphrase)
    ports = ["--listen", "127.0.0.1", "--port", "0", "--node-port", "0", "--bulk-port", "0"]
    (start_command,) = values(unit, "ExecStart")
    child = start([*start_command.split(), *ports], is_read=True, environment=variables)
    try:
        assert wait_until_ready(child).operator_token_file.startswith(str(tmp_path))
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=240) == 0
    finally:
        kill_group(child)
        assert child.stdout
        child.stdout.close()
