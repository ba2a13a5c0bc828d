"""Churn in a world file: a measured class by name, or lengths of one's own."""

from netsim.network.profiles import Churn, Phase, Span, SpanKind, churn_class
from netsim.network.worldfile.links import word
from netsim.network.worldfile.table import Table

NONE = "none"
OF_THE_PROFILE = "profile"


def read_churn(table: Table, inherited: Churn | str, of_profile: str) -> Churn | None:
    """How a group comes and goes; None: its nodes stay.

    Args:
        table: The group's.
        inherited: The world's churn, for groups that say nothing.
        of_profile: The class that the group's profile names; empty for none.
    """
    given = inherited if not table.has("churn") else read_word_or_table(table)
    if isinstance(given, Churn):
        return given
    name = of_profile if given == OF_THE_PROFILE else given
    return None if name in {NONE, ""} else churn_class(name)


def read_word_or_table(table: Table) -> Churn | str:
    """``churn = "c3"``, or a table with ``session`` and ``absence``."""
    if isinstance(table.given("churn"), str):
        name = str(table.text("churn"))
        if name not in {NONE, OF_THE_PROFILE}:
            with table.placed("churn"):
                churn_class(name)
        return name
    own = table.table("churn")
    if own is None:
        return NONE
    churn = Churn(_span(own, "session"), _span(own, "absence"))
    own.finish()
    return churn


def _span(table: Table, key: str) -> Span:
    own = table.table(key)
    if own is None:
        fix = f'add {key} = {{ kind = "exponential", scale = "10m" }}'
        raise table.refused(key, f"{key} is missing", fix)
    kind = word(own, "kind", SpanKind) or SpanKind.EXPONENTIAL
    scale_us = own.span_us("scale") or 0
    shape = own.number("shape", 1e-6, 1e6)
    phases = tuple(_phase(each) for each in own.tables("phases") or ())
    own.finish()
    with own.placed():
        return Span(
            kind=kind,
            scale_s=scale_us / 1e6,
            shape=1.0 if shape is None else shape,
            phases=phases,
        )


def _phase(table: Table) -> Phase:
    share, mean_us = table.number("share", 0, 1e6), table.span_us("mean")
    table.finish()
    if not share or not mean_us:
        raise table.refused("", "a phase needs a share and a mean", 'add share = 0.5, mean = "2m"')
    return Phase(share, mean_us / 1e6)
