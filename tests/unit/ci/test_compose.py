"""The compose file of several coordinators: what it names is there, and its commands parse."""

from typing import Any

import pytest
import typer
import yaml
from typer.core import TyperGroup

from coordinator.config import Settings
from coordinator.shell.outbox.redis_stream import parse_address
from hypergpu.user.cli.main import app
from hypergpu.user.client.settings import known_settings
from tests.compose_file import FILE, compose_services, told_commands

VARIABLES = {
    "HYPERGPU_HOST": "gpu.example.org",
    "POSTGRES_PASSWORD": "word",
    "S3_ACCESS_KEY": "key",
    "S3_SECRET_KEY": "secret",
}
COORDINATORS = ("coordinator-1", "coordinator-2")
GATEWAYS = ("gateway-1", "gateway-2")
PREFIX = "HYPERGPU_COORDINATOR_"


def parse(words: list[str]) -> dict[str, Any]:
    """Values of a command's options by the command line's own parser, which runs nothing."""
    program, *rest = words
    assert program == "hypergpu"
    command: Any = typer.main.get_command(app)
    context = None
    while isinstance(command, TyperGroup):
        context = command.make_context(command.name, rest, parent=context)
        left_words = [*context._protected_args, *context.args]
        _, command, rest = command.resolve_command(context, left_words)
    values: dict[str, Any] = command.make_context(command.name, rest, parent=context).params
    return values


def settings_of(name: str) -> dict[str, str]:
    """Settings that a coordinator is told, by their names."""
    environment = compose_services(VARIABLES)[name]["environment"]
    return {
        key.removeprefix(PREFIX).lower(): value
        for key, value in environment.items()
        if key.startswith(PREFIX)
    }


def test_each_command_that_people_are_told_parses() -> None:
    parsed_commands = [(words[1:3], parse(words)) for words in told_commands()]
    assert [words for words, _ in parsed_commands] == [["token", "create"]] * 2
    gateways, nodes = (values for _, values in parsed_commands)
    assert (gateways["role"].value, gateways["ttl"]) == ("operator", 8760 * 3600)
    assert (nodes["nodes"], nodes["gateway"]) == (100, ["gpu.example.org:7700"])


@pytest.mark.parametrize("name", GATEWAYS)
def test_a_gateway_is_started_by_a_command_that_parses(name: str) -> None:
    services = compose_services(VARIABLES)
    own = services[name]
    values = parse([*own["entrypoint"], *own["command"]])
    addresses = [f"{each}:{settings_of(each)['port']}" for each in COORDINATORS]
    assert values["coordinator"] == addresses
    assert values["advertise"] == ["gpu.example.org"]
    assert own["network_mode"] == "service:address"
    assert {each.partition(":")[0] for each in services["address"]["ports"]} == {"7700", "7701"}


@pytest.mark.parametrize("name", COORDINATORS)
def test_a_coordinator_is_told_settings_that_it_has(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = compose_services(VARIABLES)[name]
    known_variables = {each.environment for each in known_settings().values()}
    others = {key for key in own["environment"] if key.startswith("HYPERGPU_")}
    assert {each for each in others if not each.startswith(PREFIX)} <= known_variables
    for key, value in own["environment"].items():
        monkeypatch.setenv(key, value)
    settings = Settings()
    assert settings.takeover
    assert settings.engine == ""
    assert settings.advertise == ("gpu.example.org",)
    assert own["ports"] == [f"{settings.port}:{settings.port}"]
    assert parse_address(settings.events).stream == "hypergpu"


def test_coordinators_differ_in_their_ports_and_folders_alone() -> None:
    first, second = (settings_of(name) for name in COORDINATORS)
    assert {key for key in first if first[key] != second.get(key)} == {"port", "node_port"}
    services = compose_services(VARIABLES)
    assert services[COORDINATORS[0]]["volumes"] != services[COORDINATORS[1]]["volumes"]


def test_every_setting_of_a_coordinator_stands_in_its_parser() -> None:
    assert set(settings_of("coordinator-1")) <= set(Settings.model_fields)


def test_what_the_services_name_is_there() -> None:
    whole = yaml.safe_load(FILE.read_text("utf-8"))
    services = whole["services"]
    assert set(services) == {"postgres", "redis", "s3", *COORDINATORS, "address", *GATEWAYS}
    for name, service in services.items():
        volumes = {each.partition(":")[0] for each in service.get("volumes", ())}
        assert volumes <= set(whole["volumes"]), name
        assert set(service.get("secrets", ())) <= set(whole["secrets"]), name
        assert set(service.get("depends_on", ())) <= set(services), name
        assert "healthcheck" in service or name == "address", name
        if "build" in service:
            context, dockerfile = (service["build"][key] for key in ("context", "dockerfile"))
            assert (FILE.parent / context / dockerfile).is_file()
    for service in COORDINATORS:
        secret = settings_of(service)["passphrase_file"].rpartition("/")[2]
        assert secret in services[service]["secrets"]
