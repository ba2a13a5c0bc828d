"""Whether a node meets a job's requirements, and why it does not. Rests on what nodes say."""

from collections.abc import Mapping, Sequence, Set

from hypergpu.jobfile.requirements import PROPERTIES, SIZE, Requirement, number_in

NodeFeatures = Mapping[str, str | int]
"""Properties of a node and its owner's labels, by name; sizes in bytes."""


def unmet_reason(requirements: Sequence[Requirement], features: NodeFeatures) -> str:
    """The first requirement that a node does not meet, in words; empty: it meets all."""
    for each in requirements:
        if each.name not in features:
            kind_of_word = "property" if each.name in PROPERTIES else "label"
            return f"it tells no {kind_of_word} {each.name}, and {each.text} is required"
        value = features[each.name]
        if not _holds(each, value):
            shown_value = _value_text(each.name, value)
            return f"its {each.name} is {shown_value}, and {each.text} is required"
    return ""


def operator_reason(called: Set[str], lacking: Set[str], torch: str) -> str:
    """Why a node cannot train a job: operators that its torch lacks, and the fix; empty: none."""
    missing_operators = sorted(called & lacking)
    if not missing_operators:
        return ""
    more = f" and {len(missing_operators) - 1} more" if missing_operators[1:] else ""
    return (
        f"its torch {torch} lacks {missing_operators[0]}{more}, which the model calls."
        " Fix there: pip install -U torch"
    )


def experts_reason(*, is_partial: bool, holds_experts: bool) -> str:
    """Why a node cannot take part in a job whose nodes hold some experts of a mixture; empty: it
    can, or they hold all.

    Args:
        is_partial: Whether the job's nodes hold some of the experts only.
        holds_experts: Whether the node's software can.
    """
    if holds_experts or not is_partial:
        return ""
    return "its software holds no part of a mixture: pip install --upgrade hypergpu on the node"


def optimizer_reason(optimizer: str, optimizers: Set[str]) -> str:
    """Why a node cannot train a job: the optimizer that its version has not; empty: it has it."""
    if optimizer in optimizers:
        return ""
    return (
        f"its version has no optimizer {optimizer}."
        " Fix there: pip install --upgrade hypergpu; or state another inner.optimizer in the job"
    )


def _holds(requirement: Requirement, value: str | int) -> bool:
    required_value = requirement.value
    if isinstance(required_value, str):
        is_equal = str(value).lower() == required_value.lower()
        return is_equal if requirement.operator == "=" else not is_equal
    node_value = number_in(value) if isinstance(value, str) else value
    if node_value is None:
        return False
    match requirement.operator:
        case "=":
            return node_value == required_value
        case "!=":
            return node_value != required_value
        case ">=":
            return node_value >= required_value
        case "<=":
            return node_value <= required_value
        case ">":
            return node_value > required_value
        case _:
            return node_value < required_value


def _value_text(name: str, value: str | int) -> str:
    if PROPERTIES.get(name) != SIZE or isinstance(value, str):
        return str(value)
    return f"{value / 10**9:.3g} GB" if value else "none"
