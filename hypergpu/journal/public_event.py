"""What every public event of a job's journal is made of."""

import msgspec

_SUFFIX = "Event"


class PublicEvent(
    msgspec.Struct,
    frozen=True,
    tag_field="kind",
    tag=lambda name: name.removesuffix(_SUFFIX),
):
    """An event of one kind; the class is called after it. Its time stands beside it."""
