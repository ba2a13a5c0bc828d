"""What a profile is."""

import msgspec

from netsim.link import Link, Variation


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A link that somebody really has, by name."""

    name: str
    link: Link
    variation: Variation = Variation()
    churn: str = ""
    """A name of `CHURN_CLASSES`; empty: such machines stay. Worlds use it only when asked."""
    source: str
    """Where the numbers come from, in words."""
