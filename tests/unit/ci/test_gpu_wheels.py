"""Wheels that are carried to a machine with a GPU and no index."""

import os
import platform
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile

import pytest

SCRIPTS = Path(__file__).parents[3] / ".ci"
OWN = f"cp{sys.version_info.major}{sys.version_info.minor}"
HERE = platform.machine()


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("wheel", "does_fit"),
    [
        ("pure-1.0-py3-none-any.whl", True),
        ("old-1.0-py2.py3-none-any.whl", True),
        (f"own-1.0-{OWN}-{OWN}-manylinux_2_17_{HERE}.whl", True),
        (f"stable-1.0-cp38-abi3-manylinux_2_17_{HERE}.manylinux2014_{HERE}.whl", True),
        (f"other-1.0-cp27-cp27m-manylinux_2_17_{HERE}.whl", False),
        (f"elsewhere-1.0-{OWN}-{OWN}-manylinux_2_17_s390x.whl", False),
    ],
)
def test_only_wheels_of_this_python_and_machine_are_unpacked(
    wheel: str, *, does_fit: bool, tmp_path: Path
) -> None:
    with ZipFile(tmp_path / wheel, "w") as archive:
        archive.writestr("carried.py", "")
    script("bench_gpu").unpack([tmp_path / wheel], tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "carried.py").exists() is does_fit


def test_what_the_machine_has_itself_is_not_carried() -> None:
    wheels = script("gpu_wheels")
    pins = wheels.pins("numpy==2.3.0 \\\n    --hash=sha256:00\nmsgspec==0.19.0 \\\ntorch==2.9.0\n")
    assert pins == ["msgspec==0.19.0"]
    assert not {"torch", "numpy"} & {wheels.name_of(each) for each in wheels.packages()}


def test_a_python_without_the_packages_is_told_what_to_fetch_and_carry() -> None:
    # -S leaves out what is installed.
    command = [sys.executable, "-S", "-E", str(SCRIPTS / "bench_gpu.py"), "--dry"]
    environment = {"PATH": os.environ["PATH"]}
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert process.returncode == 2
    assert "lacks torch" in process.stderr
    assert "make gpu-wheels GPU_PYTHON=" in process.stderr
