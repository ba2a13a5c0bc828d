"""Profiles and churn by name; a name that is none is answered with what was probably meant."""

from collections.abc import Mapping
from typing import TypeVar

from hypergpu.jobfile.problem import join_words, nearest
from netsim.error import NetsimError
from netsim.network.profiles.churn import Churn
from netsim.network.profiles.churn_classes import CHURN_CLASSES
from netsim.network.profiles.entry import Profile
from netsim.network.profiles.table import PROFILES

_ALSO_SAID = {
    "3g": "3g-moving",
    "4g": "lte-moving",
    "5g": "5g-moving",
    "adsl": "home-dsl",
    "cable": "home-cable",
    "dsl": "home-dsl",
    "fiber": "home-fibre",
    "fibre": "home-fibre",
    "hostile": "stress",
    "lte": "lte-moving",
    "satellite": "geo-sat",
    "wifi": "wifi-bad",
}

_Found = TypeVar("_Found")


def profile(name: str) -> Profile:
    """The profile of this name.

    Raises:
        NetsimError: There is none; says which was probably meant.
    """
    return _found(name, PROFILES, "profile")


def churn_class(name: str) -> Churn:
    """The churn of this name.

    Raises:
        NetsimError: There is none; says which was probably meant.
    """
    return _found(name, CHURN_CLASSES, "churn")


def _found(name: str, known: Mapping[str, _Found], word: str) -> _Found:
    if name in known:
        return known[name]
    lowered = {each.lower(): each for each in known}
    said = _ALSO_SAID.get(name.lower(), "")
    meant = said if said in known else lowered.get(nearest(name, list(lowered)), "")
    fix = f'did you mean "{meant}"?' if meant else f"choose one of {join_words(known)}"
    raise NetsimError(f'there is no {word} "{name}"', fix)
