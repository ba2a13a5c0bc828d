"""The systemd units of `examples`."""

import tomllib
from pathlib import Path

import pytest

from coordinator.config import Settings
from gpu_node.config import NodeSettings

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
    (started,) = values(unit, "ExecStart")
    assert Path(started.split()[0]).name in scripts
    known = {
        settings.model_config["env_prefix"] + name.upper()
        for settings in (Settings, NodeSettings)
        for name in settings.model_fields
    }
    used = {each.partition("=")[0] for each in values(unit, "Environment")}
    assert used
    assert used <= known
    (folder,) = values(unit, "StateDirectory")
    assert any(each.endswith(f"=/var/lib/{folder}") for each in values(unit, "Environment"))
    assert values(unit, "User") == ["hypergpu"]
