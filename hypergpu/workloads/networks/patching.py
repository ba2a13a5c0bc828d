"""Attributes of classes and modules that are others for a moment."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a class or module while a block runs."""
    before = vars(owner).get(name)
    is_inherited = name not in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
