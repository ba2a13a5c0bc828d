"""Breaches of the naming and structure rules that a machine can see, each with its place."""

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from tests.architecture.owners import PRODUCT, alias_names, class_names, uncustomary_aliases
from tests.architecture.participles import is_bare_participle, is_participle_of_a_value, locals_of
from tests.architecture.tree import (
    ROOT,
    both_way_pairs,
    circular_modules,
    handwritten_files,
    modules,
)

SOURCE = {".css", ".html", ".proto", ".py", ".sh", ".sol", ".svelte", ".ts"}
FUNCTION_LINES = 60
BAG_FIELDS = 9
_SHELL = "coordinator.shell."
FRAGMENT_STARTS = ("Of ", "Whose ", "What is ")


class Offender(msgspec.Struct, frozen=True, order=True):
    """One breach of a rule."""

    path: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name}"


def _functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, nodes in modules():
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def bare_participles() -> Iterator[Offender]:
    """Yield functions whose whole name is a past participle."""
    for path, node in _functions():
        if is_bare_participle(node.name):
            yield Offender(str(path), node.lineno, node.name)


def participle_locals() -> Iterator[Offender]:
    """Yield locals of functions whose whole name is a participle: a value's name is a noun."""
    for path, nodes in modules():
        for line, name in locals_of(nodes):
            if is_participle_of_a_value(name):
                yield Offender(str(path), line, name)


def duplicate_types() -> Iterator[Offender]:
    """Yield every definition of a type's name that has more than one: of a class anywhere, of a
    public alias or type variable in the product.
    """
    places = defaultdict(list)
    for path, nodes in modules():
        names = [*class_names(nodes), *(alias_names(nodes) if path.parts[0] in PRODUCT else ())]
        for line, name in names:
            places[name].append(Offender(str(path), line, name))
    for definitions in places.values():
        if len(definitions) > 1:
            yield from definitions


def hidden_owners() -> Iterator[Offender]:
    """Yield imports of the product whose alias hides what a name is and who defines it."""
    for path, nodes in modules():
        if path.parts[0] in PRODUCT:
            for line, text in uncustomary_aliases(nodes):
                yield Offender(str(path), line, text)


def fragments() -> Iterator[Offender]:
    """Yield docstrings, those of fields included, that begin without a subject."""
    for path, nodes in modules():
        for node in nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str) and text.startswith(FRAGMENT_STARTS):
                    yield Offender(str(path), node.lineno, text.splitlines()[0])


def bags() -> Iterator[Offender]:
    """Yield values of the coordinator's shell that many of its services are fields of: who gets one
    could reach everything.
    """
    for path, nodes in modules():
        if path.parts[:2] == ("coordinator", "shell"):
            services = {
                alias.asname or alias.name
                for node in nodes
                if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(_SHELL)
                for alias in node.names
            }
            for node in nodes:
                if isinstance(node, ast.ClassDef):
                    count = sum(_type_names(field) <= services for field in _fields(node))
                    if count > BAG_FIELDS:
                        yield Offender(str(path), node.lineno, f"{node.name} has {count} services")


def _fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    return (field for field in node.body if isinstance(field, ast.AnnAssign))


def _type_names(field: ast.AnnAssign) -> set[str]:
    """Names in a field's annotation, without None."""
    return {node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name)}


def long_files() -> Iterator[Offender]:
    """Yield source files longer than 500 lines, tests longer than 700."""
    for path in handwritten_files():
        if path.suffix in SOURCE:
            count = len((ROOT / path).read_text(encoding="utf-8").splitlines())
            if count > (700 if path.parts[0] == "tests" else 500):
                yield Offender(str(path), count, "lines")


def long_functions() -> Iterator[Offender]:
    """Yield functions longer than their limit."""
    for path, node in _functions():
        if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES:
            yield Offender(str(path), node.lineno, node.name)


def folder_pairs() -> Iterator[Offender]:
    """Yield folders that import each other, with one import each way."""
    for pair in both_way_pairs(ROOT):
        yield Offender(pair.one, 0, f"<-> {pair.other} ({pair.forth}; {pair.back})")


def import_circles() -> Iterator[Offender]:
    """Yield modules that import themselves through others."""
    for path in circular_modules(ROOT):
        yield Offender(path, 0, "is part of an import circle")


RULES: Mapping[str, Callable[[], Iterator[Offender]]] = {
    "bare_participles": bare_participles,
    "participle_locals": participle_locals,
    "duplicate_types": duplicate_types,
    "hidden_owners": hidden_owners,
    "fragments": fragments,
    "bags": bags,
    "long_files": long_files,
    "long_functions": long_functions,
    "both_way_pairs": folder_pairs,
    "import_circles": import_circles,
}


def offenders_below(path: str) -> dict[str, list[Offender]]:
    """Return each rule's offenders below a folder; "." is the whole tree."""
    below = "" if path in {"", "."} else path.rstrip("/")

    def is_below(offender: Offender) -> bool:
        return not below or offender.path == below or offender.path.startswith(below + "/")

    return {rule: sorted(filter(is_below, find())) for rule, find in RULES.items()}
