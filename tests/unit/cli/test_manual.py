"""docs/cli.md says what the command does, and `hypergpu --help` is as quick as it says."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from hypergpu.errors import Reason
from hypergpu.node_report import NodeReport
from hypergpu.user.cli.doctor import Diagnosis
from hypergpu.user.cli.environment import EffectiveSettings, Environment
from hypergpu.user.cli.main import app
from hypergpu.user.client import values
from hypergpu.user.client.forecasts import JobForecastView
from hypergpu.user.client.ledger import JobLedger
from hypergpu.user.client.settings import known_settings
from hypergpu.user.client.spec_keys import SpecKeyList, SpecKeyMade
from hypergpu.user.client.values import Exported, Jobs, NodeDetail, Nodes, Submitted, Tokens
from hypergpu.user.farm.map_run import MapDone
from hypergpu.user.farm.trial import MapEstimate, MapTrial
from hypergpu.user.serving.api_keys import ApiKeyList, ApiKeyMade
from hypergpu.user.serving.plan import ModelPlan
from hypergpu.user.serving.starting import ServedModels
from netsim.cli.sweep import SweepReport
from netsim.compare.outcome import Comparison
from payments.cli.acts import SignedVerdict
from payments.cli.deploying import Deployed
from payments.cli.service import Reclaimed, Verified
from payments.cli.show import Claimed, LedgerAct

MANUAL = (Path(__file__).parents[3] / "docs/cli.md").read_text("utf-8")
ANSWERS = (
    Jobs,
    values.JobDetail,
    Submitted,
    JobForecastView,
    values.JobEvent,
    Exported,
    MapDone,
    MapTrial,
    MapEstimate,
    ServedModels,
    ModelPlan,
    ApiKeyList,
    ApiKeyMade,
    Nodes,
    NodeDetail,
    Tokens,
    values.TokenMade,
    SpecKeyMade,
    SpecKeyList,
    Comparison,
    SweepReport,
    Diagnosis,
    Environment,
    EffectiveSettings,
    JobLedger,
    Verified,
    LedgerAct,
    Claimed,
    SignedVerdict,
    Reclaimed,
    Deployed,
    NodeReport,
)


def commands() -> list[str]:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    names = []
    for name, command in root.commands.items():
        if isinstance(command, TyperGroup):
            names += [f"{name} {each}" for each in command.commands]
        else:
            names.append(name)
    return names


def test_manual_has_every_command() -> None:
    missing_names = [name for name in commands() if f"### `hypergpu {name}`\n" not in MANUAL]
    assert missing_names == []


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: str(answer.__name__))
def test_manual_has_every_schema_with_its_fields(answer: type[msgspec.Struct]) -> None:
    tag = answer.__struct_config__.tag
    fields = ", ".join(f"`{name}`" for name in answer.__struct_fields__)
    assert f"| `{tag}` | {fields} |" in MANUAL


def test_manual_has_every_setting() -> None:
    for name, definition in known_settings().items():
        assert f"| `{name}` | `{definition.environment}` | {definition.meaning} |" in MANUAL


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: str(reason.name))
def test_manual_has_every_exit_status(reason: Reason) -> None:
    numbers = f"{reason.number // 1000}xxx" if reason.exit_code >= 10 else str(reason.number)
    assert f"| {reason.exit_code} | {numbers} |" in MANUAL


HEAVY = ("grpc", "torch", "numpy", "sqlalchemy", "rich", "msgspec", "cryptography", "asyncio")


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


@pytest.mark.parametrize("words", ["--help", "job export --help", "netsim run --help"])
def test_help_imports_nothing_heavy(words: str) -> None:
    code = (
        "import sys\n"
        "from hypergpu.user.cli.main import app\n"
        f"app({words.split()!r}, standalone_mode=False)\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    assert run(code).splitlines()[-1] == "heavy: []"


def test_every_command_of_the_manual_has_help() -> None:
    commands = re.findall(r"^### `hypergpu ([a-z ]+)`", MANUAL, re.MULTILINE)
    assert len(commands) >= 18
    for words in commands:
        result = CliRunner().invoke(app, [*words.split(), "--help"])
        assert result.exit_code == 0, words
        assert "Usage: " in result.stdout
