"""Names of types and the modules that define them: a reader who meets a name looks in one place."""

import ast
import re
from collections.abc import Iterator

from tests.architecture.tree import Nodes

PRODUCT = ("coordinator", "dashboard_api", "gpu_node", "hypergpu", "netsim", "payments")
"""Packages of which every public type has one owner, aliases and type variables included."""
CUSTOMARY_ALIASES = {
    "datetime": "dt",
    "hypergpu.v1.payments_pb2": "pb",
    "numpy": "np",
    "numpy.typing": "npt",
    "pandas": "pd",
    "pyarrow": "pa",
    "torch.nn.functional": "F",
}
"""Aliases that readers know from the documentation of libraries, and one for generated code."""
NAMESAKE_MODULES = {"gpu_node.core.events": "node_events"}
"""Modules whose last name several packages use, with the name that says which one is meant."""
_ALIASES = {*CUSTOMARY_ALIASES.items(), *NAMESAKE_MODULES.items()}
_CLASS_STYLE = re.compile(r"[A-Z]\w*[a-z]\w*")
_MAKERS = {"NewType", "ParamSpec", "TypeVar", "TypeVarTuple"}


def class_names(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each class, nested and private ones included."""
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name


def alias_names(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each public alias of a type and type variable of a module.

    Constants are in capitals, so a module's variable that is written as classes are names a type.
    """
    for statement in _module_statements(nodes):
        name = _bound_name(statement)
        if name and not name.startswith("_") and _is_type(statement, name):
            yield statement.lineno, name


def uncustomary_aliases(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each import that gives a name another one, customs aside."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in node.names:
                if name.asname and name.asname != name.name:
                    whole_name = f"{package}{name.name}"
                    if (whole_name, name.asname) not in _ALIASES:
                        yield node.lineno, f"{whole_name} as {name.asname}"


def _module_statements(nodes: Nodes) -> Iterator[ast.stmt]:
    """Statements of a module outside functions and classes, those under conditions included."""
    blocks: list[ast.AST] = [node for node in nodes[:1] if isinstance(node, ast.Module)]
    while blocks:
        for child in ast.iter_child_nodes(blocks.pop()):
            if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                blocks.append(child)
            elif isinstance(child, ast.stmt):
                yield child


def _bound_name(statement: ast.stmt) -> str:
    """Name of the one variable that a statement assigns, or of a ``type`` statement; else empty."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
        case _ if _is_type_statement(statement):
            return ast.unparse(next(ast.iter_child_nodes(statement)))
        case _:
            return ""


def _is_type_statement(statement: ast.stmt) -> bool:
    # Python 3.11 has no class for ``type Name = ...``.
    return type(statement).__name__ == "TypeAlias"


def _is_type(statement: ast.stmt, name: str) -> bool:
    if _CLASS_STYLE.fullmatch(name) or _is_type_statement(statement):
        return True
    match statement:
        case ast.AnnAssign(annotation=annotation):
            return _last_name(annotation) == "TypeAlias"
        case ast.Assign(value=ast.Call(func=maker)):
            return _last_name(maker) in _MAKERS
        case _:
            return False


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]
