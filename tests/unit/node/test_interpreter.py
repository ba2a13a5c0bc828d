"""The Python of a node's worker: what it must have, and which torch pip is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpu_node.config import NodeSettings
from gpu_node.shell.owner.interpreter import (
    InterpreterFound,
    WorkerPython,
    ask_interpreter,
    lack_of,
    make_environment,
    worker_python,
)
from hypergpu.errors import HyperGPUError
from hypergpu.torch_wheels import LEGACY, PROCESSOR, REQUIREMENTS, torch_arguments

OURS = InterpreterFound("cpython-311", False, "hypergpu 1.2.0", ())


@pytest.mark.parametrize(
    ("tag", "has_torch", "software", "fix"),
    [
        ("cpython-311", True, "", ""),
        ("cpython-313", True, "hypergpu 1.2.0", ""),
        ("cpython-313", True, "", "/py -m pip install 'hypergpu[torch]==1.2.0'"),
        ("cpython-311", True, "hypergpu 1.1.0", "/py -m pip install 'hypergpu[torch]==1.2.0'"),
        ("cpython-311", False, "", "/py -m pip install torch torchvision; or --worker numpy"),
    ],
)
def test_another_python_is_refused_with_what_it_lacks(
    tag: str,
    has_torch: bool,  # noqa: FBT001
    software: str,
    fix: str,
) -> None:
    lack = lack_of(InterpreterFound(tag, has_torch, software, ()), OURS, "/py", needs_torch=True)
    assert (lack.fix if lack else "") == fix


def test_a_path_without_a_python_is_named() -> None:
    with pytest.raises(
        HyperGPUError, match="/nowhere/python is no Python that runs here"
    ) as failure:
        ask_interpreter("/nowhere/python")
    assert "--worker-python PATH" in failure.value.fix


def test_a_python_without_our_code_runs_the_worker_with_the_daemons(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    settings = NodeSettings(worker="null", worker_python=str(bare / "bin" / "python"))
    python = worker_python(settings, tmp_path / "node")
    assert (python.kind, python.path) == ("null", str(bare / "bin" / "python"))
    assert bare in python.folders
    # It serves until its stdin ends.
    process = subprocess.run(python.command(), input=b"", capture_output=True, check=True)
    assert b"WorkerCapabilities" in process.stdout


def test_the_daemons_own_python_is_used_where_no_other_is_needed(tmp_path: Path) -> None:
    for python_name in ("", "auto"):
        settings = NodeSettings(worker="numpy", worker_python=python_name)
        assert worker_python(settings, tmp_path / "node") == WorkerPython("numpy")
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_is_there_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "node.worker"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    tag = sys.implementation.cache_tag
    (folder / "installed").write_text(f"{tag} torch>=2.6 pillow>=10")
    assert make_environment(folder, ("torch>=2.6", "pillow>=10")) == folder / "bin" / "python"


@pytest.mark.full
def test_an_environment_is_made_once_and_again_for_another_build(tmp_path: Path) -> None:
    """Without a network: pip lists what is there in place of installing."""
    folder = tmp_path / "node.worker"
    dry_arguments = ("--no-index", "--dry-run", "pip")
    python = make_environment(folder, dry_arguments)
    (folder / "trace").touch()
    assert make_environment(folder, dry_arguments) == python
    assert (folder / "trace").exists()
    with pytest.raises(HyperGPUError, match="no environment for the worker") as failure:
        make_environment(folder, ("--no-index", "torch<0"))
    assert "--worker numpy" in failure.value.fix
    assert not (folder / "trace").exists()
    python = make_environment(folder, dry_arguments)
    (folder / "installed").write_text(f"cpython-310 {' '.join(dry_arguments)}")
    (folder / "trace").touch()
    assert make_environment(folder, dry_arguments) == python
    assert not (folder / "trace").exists()


@pytest.mark.parametrize(
    ("capabilities", "has_nvidia", "platform", "arguments"),
    [
        ((), False, "linux", PROCESSOR),
        ((), False, "darwin", REQUIREMENTS),
        ((), True, "linux", REQUIREMENTS),
        (("sm_89",), True, "linux", REQUIREMENTS),
        (("sm_61",), True, "linux", LEGACY),
        (("sm_52", "sm_70"), True, "linux", LEGACY),
        (("sm_86", "sm_61"), True, "linux", LEGACY),
        (("sm_35",), True, "linux", REQUIREMENTS),
    ],
)
def test_pip_gets_the_build_of_torch_that_runs_on_the_machine(
    capabilities: tuple[str, ...],
    has_nvidia: bool,  # noqa: FBT001
    platform: str,
    arguments: tuple[str, ...],
) -> None:
    assert torch_arguments(capabilities, has_nvidia=has_nvidia, platform=platform) == arguments
