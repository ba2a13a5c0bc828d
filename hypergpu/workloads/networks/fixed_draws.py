"""Random numbers that depend on the operator and the order of draws alone.

Two ways of computing the same may draw in another order, or from a generator of their own. Under
this mode each draw is seeded anew, so that they draw alike wherever they draw the same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SEED = 99


class _FixedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws: dict[str, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in function.tags:
            name = str(function).split(".")[1]
            number = self._draws[name] = self._draws.get(name, 0) + 1
            torch.manual_seed(_SEED + number)
            if "generator" in keywords:
                keywords["generator"] = None
        return function(*args, **keywords)


@contextmanager
def fixed_draws() -> Iterator[None]:
    """Seed each draw by its operator and its number."""
    with _FixedDraws():
        yield
