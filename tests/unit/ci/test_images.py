"""The Dockerfiles and the compose file of `examples/images`, read as a linter reads them."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.config import Settings
from gpu_node.config import NodeSettings

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "examples" / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
SETTINGS = {
    settings.model_config["env_prefix"] + name.upper()
    for settings in (Settings, NodeSettings)
    for name in settings.model_fields
} | {"HYPERGPU_NODE_TOKEN"}
KNOWN = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "RUN", "STOPSIGNAL", "USER"),
    *("VOLUME", "WORKDIR"),
}


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Each instruction with its arguments; lines that go on are joined, comments left out."""
    lines = [each for each in dockerfile.read_text("utf-8").splitlines() if each[:1] != "#"]
    joined_text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    line_parts = [line.partition(" ") for line in joined_text.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in line_parts]


def values(dockerfile: Path, word: str) -> list[str]:
    return [rest for name, rest in instructions(dockerfile) if name == word]


def test_there_is_an_image_for_each_daemon() -> None:
    assert [each.stem for each in DOCKERFILES] == ["coordinator", "node"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda each: each.stem)
def test_a_dockerfile_keeps_the_usual_rules(dockerfile: Path) -> None:
    assert {name for name, _ in instructions(dockerfile)} <= KNOWN
    bases = [each.partition("=")[2] for each in values(dockerfile, "ARG") if "BASE=" in each]
    assert all(re.search(r":\d", base) for base in bases), "a base without a version moves"
    assert values(dockerfile, "USER")[-1] == "hypergpu"
    assert values(dockerfile, "STOPSIGNAL") == ["SIGTERM"]
    for word in ("ENTRYPOINT", "CMD"):
        assert all(each.startswith('["') for each in values(dockerfile, word))
    for step in values(dockerfile, "RUN"):
        if "apt-get install" in step:
            assert step.startswith("apt-get update && ")
            assert "--no-install-recommends" in step
            assert "rm -rf /var/lib/apt/lists/*" in step
        assert "pip install" not in step or "--no-cache-dir" in step
        assert "curl" not in step
        assert "sudo" not in step


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda each: each.stem)
def test_an_image_starts_a_program_of_ours_with_settings_it_has(dockerfile: Path) -> None:
    (entry,) = values(dockerfile, "ENTRYPOINT")
    assert f'{entry[2:-2]} = "' in (ROOT / "pyproject.toml").read_text("utf-8")
    (variables,) = values(dockerfile, "ENV")
    variable_names = set(re.findall(r"(HYPERGPU_\w+)=", variables)) - {"HYPERGPU_IMAGE"}
    assert variable_names
    assert variable_names <= SETTINGS


def compose() -> dict[str, Any]:
    compose_file: dict[str, Any] = yaml.safe_load((IMAGES / "compose.yaml").read_text("utf-8"))
    return compose_file


def test_the_compose_file_names_files_settings_volumes_and_services_that_exist() -> None:
    whole = compose()
    services = whole["services"]
    assert set(services) == {"postgres", "coordinator", "node"}
    for service in services.values():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
            assert (IMAGES / service["build"]["context"]).resolve() == ROOT
        assert {each.partition(":")[0] for each in service["volumes"]} <= set(whole["volumes"])
        assert set(service.get("depends_on", ())) <= set(services)
    ours = services["coordinator"]["environment"] | services["node"]["environment"]
    assert set(ours) <= SETTINGS
    published_ports = {each.partition(":")[2] for each in services["coordinator"]["ports"]}
    (exposed_ports,) = values(IMAGES / "coordinator.Dockerfile", "EXPOSE")
    assert published_ports == set(exposed_ports.split())


def test_what_an_image_is_built_of_is_what_the_wheel_is_built_of() -> None:
    ignored_paths = (ROOT / ".dockerignore").read_text("utf-8").split()
    sources = [each.removeprefix("!") for each in ignored_paths if each.startswith("!")]
    assert all((ROOT / each).exists() for each in sources)
    assert {"coordinator", "gpu_node", "hypergpu", "contracts/artifacts"} <= set(sources)


@pytest.mark.full
@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda each: each.stem)
def test_the_steps_of_an_image_run_as_a_script(dockerfile: Path, tmp_path: Path) -> None:
    """Without a builder: those that need no package of the system, with an extra of nothing."""
    steps = [each for each in values(dockerfile, "RUN") if "apt-get" not in each]
    script = "set -e; EXTRAS=page; PIP_OPTIONS=; " + "; ".join(steps)
    moved_script = script.replace("/opt/hypergpu", str(tmp_path / "hypergpu"))
    subprocess.run(["sh", "-c", moved_script], cwd=ROOT, check=True)
    (entry,) = values(dockerfile, "ENTRYPOINT")
    program = tmp_path / "hypergpu" / "bin" / entry[2:-2]
    subprocess.run([program, "--version"], check=True)
