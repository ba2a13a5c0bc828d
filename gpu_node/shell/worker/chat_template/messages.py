"""What a worker and the process that renders its chat templates tell each other, and its limits."""

from typing import Any

import msgspec

from hypergpu.units import Bytes

TEMPLATE_BYTES_MOST = Bytes(64 << 10)
"""Size of a chat template at most."""
TEXT_CHARACTERS_MOST = 4 << 20
"""Length of the text that a template may write."""
MEMORY_BYTES_MOST = Bytes(512 << 20)
"""Address space of the process that renders."""
TIME_MOST_S = 5
"""Time for one rendering."""


class RenderTemplate(msgspec.Struct, frozen=True):
    """A template to render, with what it may name."""

    template: str
    variables: dict[str, Any]


class RenderedTemplate(msgspec.Struct, frozen=True):
    """What came of it."""

    text: str = ""
    refusal: str = ""
    """Why there is no text; empty: there is."""
