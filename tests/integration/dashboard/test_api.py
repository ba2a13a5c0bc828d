"""The API keeps what its OpenAPI document says, whatever it is asked."""

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.dashboard.test_live import bearer, page_beside
from tests.processes import Cluster

CHECKS = (
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    with Cluster(tmp_path_factory.mktemp("api")) as cluster, page_beside(cluster) as origin:
        yield f"{origin}/api/v1/openapi.json", bearer(cluster)


@pytest.fixture
def described(api: tuple[str, dict[str, str]]) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(api[0])


schema = schemathesis.pytest.from_fixture("described")


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
def test_every_answer_is_as_documented(
    case: schemathesis.Case, api: tuple[str, dict[str, str]]
) -> None:
    case.call_and_validate(headers=api[1], checks=CHECKS)
