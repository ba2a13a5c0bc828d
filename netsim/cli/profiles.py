"""Lists the links that have a name."""

import msgspec

from hypergpu.terminal.output import Column, say_json, say_table
from netsim.link import LinkDirection
from netsim.network.profiles import PROFILES, Profile


class ProfileList(msgspec.Struct, frozen=True):
    """Every profile."""

    profiles: tuple[Profile, ...]


def list_profiles(*, as_json: bool) -> None:
    """Print every profile with the sources of its numbers."""
    if as_json:
        say_json(ProfileList(tuple(PROFILES.values())))
        return
    columns = (
        Column("name"),
        Column("rtt ms", is_number=True),
        Column("jitter ms", is_number=True),
        Column("loss % / burst", is_number=True),
        Column("down / up Mbit/s", is_number=True),
        Column("queue ms", is_number=True),
        Column("source"),
    )
    say_table(columns, [_row(each) for each in PROFILES.values()], empty="there are none")


def _row(profile: Profile) -> tuple[str, ...]:
    link = profile.shape.link
    up, down = link.up, link.down
    return (
        profile.name,
        f"{link.rtt_us / 1000:g}",
        f"{up.jitter_us / 1000:.1f}",
        _loss(up),
        f"{down.bits_per_s / 1e6:g} / {up.bits_per_s / 1e6:g}",
        str(up.queue_ms),
        profile.source,
    )


def _loss(direction: LinkDirection) -> str:
    if not direction.loss:
        return "0"
    return f"{direction.loss * 100:g} / {direction.burst_packets:g}"
