"""Links that people really have, by name, with their sources; how machines come and go."""

from netsim.network.profiles.churn import Absence, Churn, Phase, Span, SpanKind, absences
from netsim.network.profiles.churn_classes import CHURN_CLASSES
from netsim.network.profiles.entry import Profile
from netsim.network.profiles.lookup import churn_class, profile
from netsim.network.profiles.table import PROFILES

__all__ = [
    "CHURN_CLASSES",
    "PROFILES",
    "Absence",
    "Churn",
    "Phase",
    "Profile",
    "Span",
    "SpanKind",
    "absences",
    "churn_class",
    "profile",
]
