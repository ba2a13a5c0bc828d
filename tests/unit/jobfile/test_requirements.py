"""Requirements on nodes and labels of nodes: what is read, refused, and met."""

import pytest

from coordinator.core.work.node_fit import NodeFeatures, unmet_reason
from hypergpu.jobfile.reading import parse_job
from hypergpu.jobfile.requirements import (
    REQUIREMENTS_MOST,
    RequirementError,
    parse_label,
    parse_requirement,
)
from hypergpu.jobfile.toml import JobFileError

LARGE: NodeFeatures = {
    "device": "cuda",
    "gpu": 8_361_000_000,
    "cores": 16,
    "region": "eu",
    "rank": "7",
}
SMALL: NodeFeatures = {"device": "cpu", "gpu": 0, "cores": 2}


@pytest.mark.parametrize(
    ("text", "is_met"),
    [
        ("gpu >= 8GB", True),
        ("gpu>=8000MB", True),
        ("gpu > 8.5 GB", False),
        ("cores >= 16", True),
        ("cores < 16", False),
        ("cores = 16", True),
        ("device = cuda", True),
        ("device != cuda", False),
        ("region = EU", True),
        ("region != us", True),
        ("rank >= 7", True),
        ("rank = 7", True),
        ("rank = 07", False),
        ("region > 3", False),
        ("software = 0.1.0", False),
    ],
)
def test_a_requirement_compares_what_a_node_says(text: str, is_met: bool) -> None:  # noqa: FBT001
    assert (unmet_reason([parse_requirement(text)], LARGE) == "") == is_met


def test_the_reason_names_what_is_and_what_is_required() -> None:
    requirements = [parse_requirement(text) for text in ("cores >= 2", "gpu >= 8GB", "region = eu")]
    assert unmet_reason(requirements, LARGE) == ""
    assert unmet_reason(requirements, SMALL) == "its gpu is none, and gpu >= 8GB is required"
    reason = unmet_reason(requirements[2:], SMALL)
    assert reason == "it tells no label region, and region = eu is required"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("gpu 8GB", '"gpu 8GB" is no comparison. Fix: write NAME OPERATOR VALUE'),
        ("", '"" is no comparison'),
        ("gpu >= many", '"many" is no size. Fix: write for example "gpu >= 8GB"'),
        ("cores >= 4GB", '"4GB" is no number. Fix: write for example "cores >= 4"'),
        ("region > eu", '"eu" is a text, and texts have no order. Fix: write "region = eu"'),
        ("device >= 3", '"3" is a text, and texts have no order'),
        ("x" * 400, "is no comparison"),
    ],
)
def test_what_is_no_requirement_is_refused_with_the_fix(text: str, what: str) -> None:
    with pytest.raises(JobFileError) as failure:
        parse_job(f'workload = "digits-cnn"\n[nodes]\nlabels = ["{text}"]')
    assert what in str(failure.value)
    assert "job file:3 [nodes] labels" in str(failure.value)


def test_a_job_has_a_bounded_number_of_requirements() -> None:
    texts = ['"cores > 1"'] * (REQUIREMENTS_MOST + 1)
    with pytest.raises(JobFileError, match="there are 17 requirements"):
        parse_job(f'workload = "digits-cnn"\n[nodes]\nlabels = [{", ".join(texts)}]')


def test_the_least_number_of_nodes_has_one_name() -> None:
    with pytest.raises(JobFileError, match=r"no key min here. Fix: nodes belongs to \[training\]"):
        parse_job('workload = "digits-cnn"\n[nodes]\nmin = 2')
    with pytest.raises(JobFileError, match=r"at most 1 node, and training.nodes waits for 2"):
        parse_job('workload = "digits-cnn"\n[nodes]\nmax = 1\n[training]\nnodes = 2')


def test_labels_are_names_with_values_and_hide_no_property() -> None:
    assert parse_label("region = eu-1") == ("region", "eu-1")
    for text in ("region", "Region=eu", "region=", "a=b=c", "gpu=80GB", "x" * 500):
        with pytest.raises(RequirementError):
            parse_label(text)
