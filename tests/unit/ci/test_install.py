import os
import subprocess
import sys
import venv
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

INSTALL = Path(__file__).parents[3] / ".ci" / "install.py"


@pytest.fixture
def install() -> ModuleType:
    spec = spec_from_file_location("install", INSTALL)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_gets_the_indexes_and_wheels_that_pip_is_configured_with(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://a.example https://b.example")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels /more")
    monkeypatch.setenv("UV_INDEX", "https://chosen.example")
    found = install.uv_environment()
    assert found["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert found["UV_INDEX"] == "https://chosen.example"
    assert found["UV_FIND_LINKS"] == "/wheels,/more"


def test_pip_installs_what_uv_cannot(tmp_path: Path) -> None:
    """An empty wheel from a folder, with a setting that uv refuses."""
    target = tmp_path / "environment"
    venv.create(target, with_pip=False)
    wheels = tmp_path / "wheels"
    build_empty_wheel(wheels)
    (tmp_path / "lock.txt").write_text("nothing==1.0\n", encoding="utf-8")
    environment = {**os.environ, "PIP_FIND_LINKS": str(wheels), "UV_HTTP_TIMEOUT": "never"}
    command = [sys.executable, str(INSTALL), str(target), str(tmp_path / "lock.txt")]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert list(target.glob("lib/python3*/site-packages/nothing-1.0.dist-info"))
    assert "pip is tried" in done.stderr


def build_empty_wheel(folder: Path) -> None:
    """Write a wheel without a module, so that nothing is fetched."""
    folder.mkdir()
    metadata = "nothing-1.0.dist-info"
    with ZipFile(folder / "nothing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1.0\n"
        )
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(
            f"{metadata}/RECORD",
            f"{metadata}/METADATA,,\n{metadata}/WHEEL,,\n{metadata}/RECORD,,\n",
        )
