"""The OpenAPI document, made from the table of endpoints."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from dashboard_api.shell.api import Endpoint, Parameter
from dashboard_api.shell.failures import FailureAnswer

PREFIX = "/api/v1"
_REFERENCE = "#/components/schemas/{name}"


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The document of the whole API."""
    kinds = {FailureAnswer}
    for each in endpoints:
        kinds |= {kind for kind in (each.body, each.result) if kind not in (None, bytes)}
    ordered_kinds = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered_kinds, ref_template=_REFERENCE)
    schemas_by_kind = dict(zip(ordered_kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(PREFIX + each.path, {})[each.method.lower()] = _operation(
            each, schemas_by_kind
        )
    return {
        "openapi": "3.1.0",
        "info": {"title": "HyperGPU dashboard", "version": "1"},
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "paths": paths,
    }


def _operation(each: Endpoint, named: dict[Any, Any]) -> dict[str, Any]:
    failure = {"content": {"application/json": {"schema": named[FailureAnswer]}}}
    operation: dict[str, Any] = {
        "summary": each.meaning,
        "operationId": f"{each.method.lower()}{re.sub('[^a-z]+', '_', each.path)}".rstrip("_"),
        "security": [] if each.is_open else [{"token": []}],
        "parameters": [
            *(_path_parameter(name) for name in re.findall(r"{(\w+)}", each.path)),
            *(_query_parameter(parameter) for parameter in each.parameters),
        ],
        "responses": {
            "2XX": {
                "description": "Done.",
                "content": _content(each.result, named, each.media_type),
            },
            "4XX": {"description": "Refused: a number, a message and a fix.", **failure},
            "5XX": {"description": "The coordinator is away or failed.", **failure},
        },
    }
    if each.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(each.body, named)}
    return operation


def _content(
    kind: Any, named: dict[Any, Any], media_type: str = "application/json"
) -> dict[str, Any]:
    if kind is bytes:
        schema = {"type": "string", "format": "binary"}
        return {"application/octet-stream": {"schema": schema}}
    return {media_type: {"schema": named[kind] if kind else {"type": "object"}}}


def _path_parameter(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Za-z0-9_-]+$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _query_parameter(parameter: Parameter) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": parameter.kind}
    if parameter.kind == "integer":
        schema |= {"minimum": parameter.minimum, "maximum": parameter.maximum}
    if parameter.default:
        is_whole = parameter.kind == "integer"
        schema["default"] = int(parameter.default) if is_whole else parameter.default
    return {
        "name": parameter.name,
        "in": "query",
        "description": parameter.meaning,
        "schema": schema,
    }
