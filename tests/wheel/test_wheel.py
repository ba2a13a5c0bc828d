"""The built wheel in fresh environments, in an empty folder outside of the clone.

Only `make wheel` collects this folder. Each environment has one set of extras, and each test types
what a user types.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from email import message_from_bytes
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
CALL_TIMEOUT_S = 240
PAID_WITHIN_S = 120
JOIN = "hypergpu join "
TORCH_JOB = """
workload = "digits-cnn"
[training]
rounds = 2
inner_steps = 10
nodes = 1
[options]
channels = 8
"""
PAID_JOB = """
workload = "digits-softmax"
[training]
rounds = 10
nodes = 1
[pay]
unit_price = 1000000
rounds_per_epoch = 5
"""
Ended = subprocess.CompletedProcess[str]


class Installed(NamedTuple):
    """An environment with the wheel, and a person's empty home."""

    programs: Path
    home: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Variables of a person who knows nothing of the clone."""
        anvil = next((ROOT / "node_modules" / "@foundry-rs").glob("anvil-*/bin"), None)
        path = [str(self.programs), *([str(anvil)] if anvil else []), os.environ["PATH"]]
        variables = {
            name: value for name, value in os.environ.items() if name in ("LANG", "TMPDIR")
        }
        home = {"HOME": str(self.home), "PATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        return {**variables, **home, **more}

    def run(self, *words: str) -> Ended:
        """A command to its end."""
        return subprocess.run(
            [str(self.programs / "hypergpu"), *words],
            cwd=self.home,
            env=self.environment(),
            check=False,
            capture_output=True,
            text=True,
            timeout=CALL_TIMEOUT_S,
        )

    def json(self, *words: str) -> Any:
        """The document that a command prints."""
        process = self.run(*words, "--json")
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout)


Install = Callable[[str], Installed]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel_path,) = folder.glob("*.whl")
    return wheel_path


@pytest.fixture
def install(wheel: Path, tmp_path: Path) -> Install:
    """Make an environment with the wheel and some of its extras."""

    def install_extras(extras: str) -> Installed:
        environment = tmp_path / "environment"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True
        )
        words = ["--package", f"hypergpu{extras} @ {wheel.as_uri()}"]
        constraint = ["--constraint", str(ROOT / "locks" / "dev.txt")]
        command = [sys.executable, str(ROOT / ".ci" / "install.py"), str(environment)]
        subprocess.run([*command, *words, *constraint], check=True)
        home = tmp_path / "home"
        home.mkdir()
        return Installed(environment / "bin", home)

    return install_extras


def installer() -> ModuleType:
    """`.ci/install.py`, which knows how uv gets what the user configured for pip."""
    spec = spec_from_file_location("install", ROOT / ".ci" / "install.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def program(at: Installed, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs beside the test, and ends in good order when it is asked to."""
    with (at.home / f"{words[0]}.err").open("w", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [str(at.programs / "hypergpu"), *words],
            cwd=at.home,
            env=at.environment(**variables),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield child
    finally:
        # Killed, it would leave what it started.
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=CALL_TIMEOUT_S)
    assert child.returncode == 0, (at.home / f"{words[0]}.err").read_text("utf-8")


@contextmanager
def run_job(at: Installed, job: str, **variables: str) -> Iterator[dict[str, Any]]:
    """Run `up`, `join` and the job to its end; yields the job while the coordinator runs."""
    (at.home / "job.toml").write_text(job, encoding="utf-8")
    with ExitStack() as stack:
        up = ["up", "--listen", "127.0.0.1", "--port", "0", "--node-port", "0", "--bulk-port", "0"]
        child = stack.enter_context(program(at, *up, **variables))
        assert child.stdout
        lines = iter(child.stdout.readline, "")
        token = next((line.split()[-1] for line in lines if line.strip().startswith(JOIN)), "")
        assert token, (at.home / "up.err").read_text("utf-8")
        # What it says later must not fill the pipe.
        assert any(line.startswith("Ctrl-C") for line in lines)
        stack.enter_context(program(at, "join", token))
        process = at.run("job", "submit", "job.toml", "--watch")
        assert process.returncode == 0, process.stderr
        yield at.json("job", "show")["job"]


def first_job() -> str:
    return (ROOT / "examples" / "first-job.toml").read_text("utf-8")


def only_account(at: Installed) -> dict[str, Any]:
    """The node's account, in the ledger's own part of the document where it has one."""
    ledger_document = at.json("ledger", "show")
    account: dict[str, Any]
    (account,) = ledger_document.get("ledger", ledger_document)["nodes"]
    return account


def is_paid(account: dict[str, Any]) -> bool:
    worth = int(account.get("worth") or account.get("earned") or 0)
    return 0 < worth == int(account.get("paid") or 0)


def assert_one_sentence(ended: Ended, extra: str) -> None:
    # How a job is counted is told beside it.
    error_lines = ended.stderr.splitlines()
    (line,) = [each for each in error_lines if not each.startswith("strategy ")]
    assert f"pip install 'hypergpu[{extra}]'" in line, line
    assert "Fix: " in line
    assert ended.returncode == 16


def test_base_install_trains_and_names_the_extra_that_it_lacks(install: Install) -> None:
    at = install("")
    with run_job(at, first_job()) as job:
        # Plans decide how many rounds its work takes.
        assert job["phase"] == "finished"
        assert job["round"] > 1
        assert job["metric"] > 0.9
        process = at.run("job", "export", "--out", "model")
        assert process.returncode == 0, process.stderr
        process = at.run("job", "watch", "--log", "tensorboard:runs")
        assert_one_sentence(process, "tensorboard")
        (at.home / "torch.toml").write_text(TORCH_JOB, encoding="utf-8")
        assert_one_sentence(at.run("job", "submit", "torch.toml", "--watch"), "torch")
    assert (at.home / "model" / "model.safetensors").stat().st_size > 0
    with_chain = subprocess.run(
        [at.programs / "hypergpu", "up", "--port", "0", "--node-port", "0", "--bulk-port", "0"],
        cwd=at.home,
        env=at.environment(HYPERGPU_CHAIN="anvil"),
        check=False,
        capture_output=True,
        text=True,
        timeout=CALL_TIMEOUT_S,
    )
    assert_one_sentence(with_chain, "chain")


def test_base_install_checks_links_over_the_proxy(install: Install) -> None:
    """Netsim needs no extra: the machine's part names every backend."""
    process = install("").run("netsim", "check", "lan", "--for", "500ms")
    assert "Traceback" not in process.stderr
    assert "tc " in process.stdout


def test_chain_extra_pays_a_job_on_a_local_chain(install: Install) -> None:
    at = install("[chain]")
    with run_job(at, PAID_JOB, HYPERGPU_CHAIN="anvil") as job:
        assert job["phase"] == "finished"
        give_up_at = time.monotonic() + PAID_WITHIN_S
        while not is_paid(account := only_account(at)):
            assert time.monotonic() < give_up_at, account
        process = at.run("ledger", "verify")
        assert process.returncode == 0, process.stderr


def test_torch_extra_trains_a_network(install: Install) -> None:
    """PyTorch takes gigabytes: it is read from the clone's environment, the wheel is not."""
    at = install("")
    (packages,) = (at.programs.parent / "lib").glob("python3*/site-packages")
    torch = find_spec("torch")
    assert torch
    assert torch.origin
    (packages / "torch.pth").write_text(f"{Path(torch.origin).parents[1]}\n", encoding="utf-8")
    with run_job(at, TORCH_JOB) as job:
        assert job["phase"] == "finished"
        assert job["round"] > 1


PACKAGES = {"coordinator", "dashboard_api", "gpu_node", "hypergpu", "netsim", "payments"}
EXTRAS = {"chain", "farm", "hf", "page", "parquet", "postgresql", "ray", "redis", "s3", "torch"}
PROGRAMS = {"hypergpu", "hypergpu-coordinator", "hypergpu-node"}
"""What the pages of an index and the manuals promise."""


def test_wheel_has_the_types_extras_and_description_of_a_public_package(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        description = message_from_bytes(archive.read(metadata))
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert set(description.get_all("Provides-Extra", [])) >= EXTRAS
    assert "Typing :: Typed" in description.get_all("Classifier", [])
    assert description["Description-Content-Type"] == "text/markdown"
    assert description["License-Expression"] == "Apache-2.0"


def tell_versions(programs: Path) -> set[str]:
    """What each program says of itself."""
    commands = [[str(programs / name), "--version"] for name in sorted(PROGRAMS)]
    answers = [
        subprocess.run(each, check=True, capture_output=True, text=True) for each in commands
    ]
    return {answer.stdout.strip() for answer in answers}


def versions(wheel: Path) -> set[str]:
    return {f"{name} {wheel.name.split('-')[1]}" for name in PROGRAMS}


def test_uv_installs_the_programs_as_tools(wheel: Path, tmp_path: Path) -> None:
    install = installer()
    uv = install.bootstrapped_uv()
    assert uv, "uv could not be installed"
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    environment = install.uv_environment() | places
    command = [uv, "tool", "install", "-q", "--python", sys.executable]
    with install.versions_of(ROOT / "locks" / "dev.txt") as versions_file:
        constraint = ["--constraints", versions_file]
        subprocess.run([*command, *constraint, str(wheel)], env=environment, check=True)
    assert tell_versions(tmp_path / "bin") == versions(wheel)


@pytest.mark.full
def test_pipx_installs_the_programs(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    installs = [sys.executable, str(ROOT / ".ci" / "install.py"), str(environment)]
    subprocess.run([*installs, "--package", "pipx"], check=True)
    places = {"PIPX_HOME": str(tmp_path / "pipx"), "PIPX_BIN_DIR": str(tmp_path / "bin")}
    with installer().versions_of(ROOT / "locks" / "dev.txt") as versions_file:
        words = ["--python", sys.executable, f"--pip-args=--constraint {versions_file}"]
        command = [str(environment / "bin" / "pipx"), "install", *words, str(wheel)]
        subprocess.run(command, env=os.environ | places, check=True)
    assert tell_versions(tmp_path / "bin") == versions(wheel)
