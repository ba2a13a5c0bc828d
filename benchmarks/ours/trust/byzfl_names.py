"""Names of byzfl's attacks and rules, for who cannot import them."""

BYZFL_ATTACKS = (
    "sign flip (byzfl)",
    "IPM 5 (byzfl)",
    "ALIE 1.5 (byzfl)",
    "optimal IPM (byzfl)",
    "optimal ALIE (byzfl)",
    "optimal IPM apart (byzfl)",
    "optimal ALIE apart (byzfl)",
    "mimic (byzfl)",
    "Gaussian (byzfl)",
    "Inf (byzfl)",
)
MIXED = "NNM + "
"""Begins the name of a rule after nearest-neighbour mixing."""
CLASSICAL = ("trimmed mean", "Multi-Krum", "geometric median", "centred clipping")
BYZFL_RULES = (*CLASSICAL, *(f"{MIXED}{name}" for name in CLASSICAL))
