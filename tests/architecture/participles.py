"""Participles as names: which words are one, and which locals of functions there are."""

import ast
from collections.abc import Iterator

from tests.architecture.tree import Nodes

NO_PARTICIPLES = frozenset({
    "bed", "bleed", "breed", "creed", "deed", "embed", "exceed", "feed", "greed", "heed",
    "need", "proceed", "red", "reed", "seed", "shed", "sled", "speed", "steed", "succeed",
    "weed",
})  # fmt: skip
"""Words that end like a regular participle and are none."""

IRREGULAR = frozenset({
    "arisen", "awoken", "begotten", "begun", "bent", "bitten", "blown", "borne", "bought",
    "broken", "brought", "built", "burnt", "caught", "chosen", "clung", "crept", "dealt",
    "done", "drawn", "driven", "dug", "eaten", "fallen", "fed", "felt", "fled", "flown",
    "flung", "forbidden", "foregone", "foreseen", "forgiven", "forgotten", "forsaken",
    "fought", "found", "frozen", "given", "gone", "got", "gotten", "granted", "grown", "had",
    "heard", "held", "hidden", "hung", "kept", "knelt", "known", "laid", "lain", "learnt",
    "led", "left", "lent", "lit", "lost", "made", "meant", "met", "mistaken", "mown",
    "outgrown", "overseen", "overtaken", "overthrown", "paid", "proven", "ridden", "risen",
    "rung", "said", "sat", "seen", "sent", "sewn", "shaken", "shone", "shorn", "shot", "shown",
    "shrunk", "shrunken", "slain", "slept", "slid", "slung", "smitten", "sold", "sought",
    "sown", "spent", "spoken", "sprung", "spun", "stolen", "stood", "strewn", "stricken",
    "striven", "struck", "stuck", "stung", "stunk", "sung", "sunk", "swept", "swollen",
    "sworn", "swum", "swung", "taken", "taught", "thought", "thrown", "told", "torn",
    "trodden", "undergone", "understood", "undertaken", "undone", "unknown", "unmade",
    "unpaid", "unseen", "unsent", "untold", "withdrawn", "withheld", "withstood", "woken",
    "won", "worn", "wound", "woven", "written", "wrought", "wrung",
})  # fmt: skip
"""Irregular participles that differ from their verb; "bound" is left out, for it is a limit too."""


def is_bare_participle(name: str) -> bool:
    """Whether a function's whole name, leading underscores aside, is one past participle."""
    word = name.strip("_")
    is_one_word = word.islower() and "_" not in word
    is_regular = word.endswith("ed") and is_one_word and word not in NO_PARTICIPLES
    return is_regular or word in IRREGULAR


NOUNS = frozenset({
    "docstring", "encoding", "finding", "funding", "greeting", "handling", "meaning", "numbering",
    "packing", "padding", "performing", "reading", "recording", "ring", "setting", "sharding",
    "standing", "string", "training", "warning", "weighing",
})  # fmt: skip
"""Words in -ing that name a thing, each by the term of the field or a class of ours."""


def is_participle_of_a_value(name: str) -> bool:
    """Whether the whole name of a value, leading underscores aside, is one participle."""
    word = name.strip("_")
    is_present = word.endswith("ing") and word.islower() and "_" not in word
    return is_bare_participle(name) or (is_present and word not in NOUNS)


Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _parameters(function: Function) -> set[str]:
    arguments = function.args
    several = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    return {each.arg for each in (*several, arguments.vararg, arguments.kwarg) if each}


def _bound_by(node: ast.AST) -> str:
    """Name that a node gives a value; empty: it gives none."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            return name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            return name
        case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
            return name
        case _:
            return ""


def _body(function: Function) -> Iterator[ast.AST]:
    """Yield a function's nodes without those of functions and classes in it."""
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        if not isinstance(node, Function | ast.ClassDef):
            yield node
            stack += ast.iter_child_nodes(node)


def locals_of(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Yield line and name wherever a function gives a value a name of its own.

    Parameters and fields of classes are left out: they are part of what is promised to callers.
    """
    for function in nodes:
        if isinstance(function, Function):
            parameters = _parameters(function)
            for node in _body(function):
                if (name := _bound_by(node)) and name not in parameters:
                    yield getattr(node, "lineno", 0), name
