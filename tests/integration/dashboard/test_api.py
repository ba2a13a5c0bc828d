"""The API keeps what its OpenAPI document says, whatever it is asked."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.dashboard.test_live import bearer, page_beside
from tests.processes import Cluster

CHECKS: list[Any] = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, str]]]:
    with Cluster(tmp_path_factory.mktemp("api")) as cluster, page_beside(cluster) as origin:
        yield f"{origin}/api/v1/openapi.json", bearer(cluster)


def test_every_answer_is_as_documented(api: tuple[str, dict[str, str]]) -> None:
    address, headers = api
    operations: list[Any] = list(schemathesis.openapi.from_url(address).get_all_operations())
    assert len(operations) > 20
    for operation_result in operations:
        operation = operation_result.ok()
        assert operation is not None, operation_result
        require_documented(operation, headers)


def require_documented(operation: Any, headers: dict[str, str]) -> None:
    """Ask one operation whatever its description allows."""

    @given(case=operation.as_strategy())
    @settings(
        max_examples=12,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def require(case: Any) -> None:
        case.call_and_validate(headers=headers, checks=CHECKS)

    require()
