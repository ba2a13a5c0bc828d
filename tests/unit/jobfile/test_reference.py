"""docs/jobs.md says what the code does, and the examples are jobs."""

import json
import re
from pathlib import Path

import pytest

from hypergpu.jobfile import LIMITS, parse_job, read_job_file
from hypergpu.jobfile.limits import CHOICES
from hypergpu.jobfile.schema import ALIASES, KEYS, SECTIONS
from hypergpu.jobfile.spec import SETTABLE
from hypergpu.workloads.entries import BUILT_IN
from hypergpu.workloads.entry import Option

ROOT = Path(__file__).parents[3]
REFERENCE = (ROOT / "docs/jobs.md").read_text("utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
TYPE_NAMES = {int: "whole number", float: "number", str: "text"}


def rows() -> dict[str, list[str]]:
    found = {}
    for line in REFERENCE.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            found[cells[0].strip("`* ") + (cells[1] if cells[1].startswith("`") else "")] = cells
    return found


def range_of(key: str) -> str:
    if key == "training.seed":
        return "[0, 2^63)"
    if key in CHOICES:
        return ", ".join(CHOICES[key])
    return str(LIMITS[key]) if key in LIMITS else ""


@pytest.mark.parametrize("key", KEYS)
def test_reference_has_each_key_with_type_default_and_range(key: str) -> None:
    name, kind, default, limits, meaning = rows()[key]
    table, _, bare = key.partition(".")
    assert name == f"`{key}` *" if key in SETTABLE else f"`{key}`"
    assert kind == TYPE_NAMES[KEYS[key]]
    assert default == f"`{json.dumps(getattr(SECTIONS[table](), bare))}`"
    assert limits == range_of(key)
    assert meaning


def test_reference_has_no_key_that_is_gone() -> None:
    spoken = {key for key in rows() if "`" not in key}
    assert spoken == {*KEYS, "workload", "name", "strategy"}


def option_rows() -> list[tuple[str, Option]]:
    return [(entry.name, option) for entry in BUILT_IN for option in entry.options]


@pytest.mark.parametrize(("workload", "option"), option_rows())
def test_reference_has_each_option(workload: str, option: Option) -> None:
    _, _, default, _, meaning = rows()[f"{workload}`{option.name}`"]
    assert default == f"`{json.dumps(option.default)}`"
    assert meaning == option.meaning


def test_reference_names_every_alias() -> None:
    missing = [alias for alias in ALIASES if f"`{alias}`" not in REFERENCE]
    assert missing == []


def test_job_file_in_the_reference_is_a_job() -> None:
    text = REFERENCE.split("```toml\n")[1].split("```")[0]
    assert parse_job(text).round.deadline_ms == 60_000


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_a_job(path: Path) -> None:
    assert read_job_file(path).name


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5


def test_the_readme_submits_a_job_that_one_node_can_begin_and_five_may_be_paid_for(
    tmp_path: Path,
) -> None:
    (name,) = re.findall(r"job submit (examples/\S+)", (ROOT / "README.md").read_text("utf-8"))
    job = read_job_file(ROOT / name)
    assert job.training.nodes == 1
    assert job.pay.unit_price == 0
    text = (ROOT / name).read_text("utf-8")
    paid = tmp_path / "paid.toml"
    paid.write_text(re.sub(r"^# (\[pay\]|\w+ = )", r"\1", text, flags=re.MULTILINE), "utf-8")
    job = read_job_file(paid)
    assert job.pay.escrow == job.pay.most_for(5 * job.stated_samples) > 0
