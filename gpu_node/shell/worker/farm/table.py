"""The kinds of items that this worker can do, by the libraries that are installed.

Nothing is imported before the first bundle of a kind: the libraries take seconds.
"""

import importlib.util
from typing import NamedTuple

from gpu_node.shell.worker.performers import Perform, Performer
from hypergpu.farm.map_request import work_kind


class ItemKind(NamedTuple):
    """A kind of items, and the function that makes its performer."""

    name: str
    module: str
    needs: tuple[str, ...]
    """Modules without which it is not offered."""
    version: int = 1

    @property
    def is_possible(self) -> bool:
        """Whether all modules that it needs are installed."""
        return all(importlib.util.find_spec(name) is not None for name in self.needs)

    def load(self) -> Perform:
        """Import what the work needs."""
        module = importlib.import_module(f"gpu_node.shell.worker.farm.{self.module}")
        perform: Perform = getattr(module, f"{self.module}_performer")()
        return perform


_TRANSFORMERS = ("torch", "transformers", "tokenizers")
ITEM_KINDS = (
    ItemKind("embed", "embed", (*_TRANSFORMERS, "sentence_transformers")),
    ItemKind("score", "score", _TRANSFORMERS),
    ItemKind("generate", "generate", (*_TRANSFORMERS, "jinja2")),
    ItemKind("classify", "classify", _TRANSFORMERS),
    ItemKind("program", "program", ("torch", "pyarrow")),
)


def item_performers() -> tuple[Performer, ...]:
    """Performers of the kinds whose libraries are installed."""
    return tuple(
        Performer(work_kind(kind.name), kind.version, kind.load)
        for kind in ITEM_KINDS
        if kind.is_possible
    )
