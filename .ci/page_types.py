"""TypeScript types of the feed's state (`dashboard_api.core.state`) and of the kinds of events.

``python .ci/page_types.py`` writes them, ``--check`` says whether the written ones are these.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, cast, get_args, get_origin

import msgspec
from msgspec import inspect

from dashboard_api.core import state
from hypergpu.journal.events import event_types

TYPES = Path(__file__).parents[1] / "dashboard_api" / "web" / "src" / "lib" / "types.ts"
_HEAD = """\
// The tree that the feed sends, as docs/feed.md describes it. Times are Unix milliseconds unless a
// name ends otherwise; amounts of money are decimal strings in the ledger's smallest units.
// Made of dashboard_api/core/state.py and hypergpu/journal/events.py by `make web`: change those.

export type Json = null | boolean | number | string | Json[] | { [key: string]: Json };
"""
_PLAIN: Mapping[type[inspect.Type], str] = {
    inspect.IntType: "number",
    inspect.FloatType: "number",
    inspect.StrType: "string",
    inspect.BoolType: "boolean",
    inspect.NoneType: "null",
    inspect.AnyType: "Json",
}


def page_types() -> str:
    """The whole file."""
    return "".join([_HEAD, _kinds(), *_aliases(), *_interfaces()])


def _kinds() -> str:
    """Kinds of events that this version knows; `EventLine` may have one of a newer version."""
    return f"export type EventKind = {_literals(tuple(event_types()))};\n"


def _aliases() -> Iterator[str]:
    """Types of texts that are one of a few, by the names that the module gives them."""
    for name, value in vars(state).items():
        if get_origin(value) is Literal:
            yield f"export type {name} = {_literals(get_args(value))};\n"


def _interfaces() -> Iterator[str]:
    module = ast.parse(Path(state.__file__).read_text("utf-8"))
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    for node in classes:
        struct = cast("inspect.StructType", inspect.type_info(getattr(state, node.name)))
        comments = _docstrings(node)
        yield f"\n{_comment(ast.get_docstring(node))}export interface {_name(node.name)} {{\n"
        for field in struct.fields:
            yield _comment(comments.get(field.name), "  ")
            yield f"  {field.name}{'?' if _is_later(field.type) else ''}: {_text(field.type)};\n"
        yield "}\n"


def _docstrings(node: ast.ClassDef) -> dict[str, str]:
    """Docstrings of a class's fields by their names."""
    texts = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            texts[ast.unparse(field.target)] = str(ast.literal_eval(after.value))
    return texts


def _comment(text: str | None, indent: str = "") -> str:
    return f"{indent}/** {' '.join(text.split())} */\n" if text else ""


def _name(class_name: str) -> str:
    """Name of a class on the page, where every type is a part of the state."""
    return "State" if class_name == "FeedState" else class_name.removesuffix("State")


def _is_later(kind: inspect.Type) -> bool:
    """Whether older recordings lack a field."""
    return isinstance(kind, inspect.Metadata) and kind.extra == state.LATER.extra


def _literals(values: tuple[object, ...]) -> str:
    return " | ".join(msgspec.json.encode(value).decode() for value in values)


def _text(kind: inspect.Type) -> str:
    """A type as TypeScript has it."""
    match kind:
        case inspect.Metadata(type=inner):
            return _text(inner)
        case inspect.LiteralType(values=values):
            return _alias(values)
        case inspect.UnionType(types=types):
            return " | ".join(_text(each) for each in types)
        case inspect.ListType(item_type=item):
            text = _text(item)
            return f"({text})[]" if "|" in text else f"{text}[]"
        case inspect.DictType(value_type=value):
            return f"Record<string, {_text(value)}>"
        case inspect.StructType(cls=cls):
            return _name(cls.__name__)
        case _:
            return _PLAIN[type(kind)]


def _alias(values: tuple[object, ...]) -> str:
    """The module's name for texts that are one of a few; without one they are listed."""
    names = [
        name
        for name, value in vars(state).items()
        if get_origin(value) is Literal and sorted(get_args(value)) == sorted(map(str, values))
    ]
    return names[0] if names else _literals(values)


def main() -> None:
    """Write the types, or check them.

    Raises:
        SystemExit: They are to be checked, and others are written.
    """
    text = page_types()
    if "--check" not in sys.argv:
        TYPES.write_text(text, "utf-8")
    elif TYPES.read_text("utf-8") != text:
        raise SystemExit(f"{TYPES} differs from what the server's state gives. Fix: make web")


if __name__ == "__main__":
    main()
