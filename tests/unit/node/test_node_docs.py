import configparser
import re
from pathlib import Path

from gpu_node.config import NodeSettings
from hypergpu.errors import Reason

ROOT = Path(__file__).parents[3]
MANUAL = (ROOT / "docs/node.md").read_text("utf-8")
UNIT = ROOT / "examples/hypergpu-node.service"


def test_the_manual_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `HYPERGPU_NODE_(\w+)` \| `?([^`|]+?)`? \|", MANUAL, re.MULTILINE))
    settings = {name.upper(): field.default for name, field in NodeSettings.model_fields.items()}
    settings["STATE_DIR"] = "~" + str(settings["STATE_DIR"]).removeprefix(str(Path.home()))
    settings["NAME"] = "the machine's"
    assert rows == {name: str(default) for name, default in settings.items()}


def test_the_service_gives_up_on_what_trying_again_cannot_mend() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    lasting = {str(reason.exit_code) for reason in (Reason.TOKEN_INVALID, Reason.NODE_NOT_JOINED)}
    assert set(unit["Service"]["RestartPreventExitStatus"].split()) == lasting


def test_the_service_waits_longer_than_a_drain_may_take() -> None:
    limit_s = NodeSettings.model_fields["drain_limit_ms"].default / 1000
    (timeout_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text("utf-8"), re.MULTILINE)
    assert int(timeout_s) > limit_s + 10
