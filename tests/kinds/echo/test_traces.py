"""A kind of work is a folder: beyond its folders and its table nothing knows it."""

import ast

from tests.architecture.tree import modules, one_per_line
from tests.kinds.echo.core.state import KIND
from tests.kinds.table import KINDS_OF_TESTS

PRODUCT = {"coordinator", "dashboard_api", "gpu_node", "hypergpu", "netsim", "payments"}
FOLDER = "tests/kinds/echo/"
PROBE = "netsim/measure/probe.py"
"""Its echo is one of datagrams."""
REQUESTS = "hypergpu/user/serving/openai_requests.py"
"""Theirs is a field of OpenAI's API."""


def _is_product(path: object) -> bool:
    return str(path).partition("/")[0] in PRODUCT


def test_the_kind_is_one_more_entry_of_the_table() -> None:
    assert [kind.core.name for kind in KINDS_OF_TESTS] == ["training", "map", "serve", KIND]


def test_no_product_code_names_the_kind() -> None:
    own = {
        node.name
        for path, nodes in modules()
        if str(path).startswith(FOLDER) and not path.name.startswith("test_")
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    assert {"EchoJob", "ItemReturned"} <= own
    traces = [
        f"{path}:{node.lineno}"
        for path, nodes in modules()
        if _is_product(path) and str(path) not in {PROBE, REQUESTS}
        for node in nodes
        if (isinstance(node, ast.Constant) and node.value == KIND)
        or (isinstance(node, ast.Name | ast.ClassDef) and _name(node) in own)
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"))
    ]
    assert not traces, one_per_line(traces)


def _name(node: ast.Name | ast.ClassDef) -> str:
    return node.id if isinstance(node, ast.Name) else node.name
