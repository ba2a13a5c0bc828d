import os
import subprocess
import sys
import venv
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

INSTALL = Path(__file__).parents[3] / ".ci" / "install.py"
INSTALLED = "environment/lib/python3*/site-packages/nothing-1.0.dist-info"


@pytest.fixture
def install() -> ModuleType:
    spec = spec_from_file_location("install", INSTALL)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_uv_gets_the_indexes_and_wheels_that_pip_is_configured_with(install: ModuleType) -> None:
    variables = install.uv_environment(
        {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": "https://mirror.example/simple",
            "PIP_EXTRA_INDEX_URL": "https://a.example https://b.example",
            "PIP_FIND_LINKS": "/wheels /more",
            "UV_INDEX": "https://chosen.example",
        }
    )
    assert variables["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert variables["UV_INDEX"] == "https://chosen.example"
    assert variables["UV_FIND_LINKS"] == "/wheels,/more"


def test_pip_installs_what_uv_cannot(tmp_path: Path) -> None:
    """An empty wheel from a folder, with a setting that uv refuses."""
    digest = build_empty_wheel(tmp_path / "wheels")
    process = install_nothing(tmp_path, f" --hash=sha256:{digest}")
    assert process.returncode == 0
    assert list(tmp_path.glob(INSTALLED))
    assert "pip is tried" in process.stderr


def test_a_package_without_its_hash_in_the_lock_is_not_installed(tmp_path: Path) -> None:
    build_empty_wheel(tmp_path / "wheels")
    assert install_nothing(tmp_path, "").returncode != 0
    assert not list(tmp_path.glob(INSTALLED))


def test_every_pin_of_every_lock_has_hashes() -> None:
    locks = sorted(INSTALL.parents[1].glob("locks/*.txt"))
    assert locks
    for lock in locks:
        pins = lock.read_text("utf-8").replace("\\\n", "").splitlines()[1:]
        assert [pin for pin in pins if "==" not in pin or "--hash=sha256:" not in pin] == [], lock


def install_nothing(folder: Path, pin: str) -> subprocess.CompletedProcess[str]:
    """Install the empty wheel of a folder by pip, as uv is given a setting that it refuses."""
    venv.create(folder / "environment", with_pip=False)
    (folder / "lock.txt").write_text(f"nothing==1.0{pin}\n", encoding="utf-8")
    wheels = {"PIP_FIND_LINKS": str(folder / "wheels"), "PIP_NO_INDEX": "1"}
    variables = {**os.environ, **wheels, "UV_HTTP_TIMEOUT": "never"}
    command = [sys.executable, str(INSTALL), str(folder / "environment"), str(folder / "lock.txt")]
    return subprocess.run(command, env=variables, check=False, capture_output=True, text=True)


def build_empty_wheel(folder: Path) -> str:
    """Write a wheel without a module, so that nothing is fetched; returns its SHA-256."""
    folder.mkdir()
    metadata = "nothing-1.0.dist-info"
    path = folder / "nothing-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as wheel:
        wheel.writestr(
            f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: nothing\nVersion: 1.0\n"
        )
        wheel.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(
            f"{metadata}/RECORD",
            f"{metadata}/METADATA,,\n{metadata}/WHEEL,,\n{metadata}/RECORD,,\n",
        )
    return sha256(path.read_bytes()).hexdigest()
