"""Takes the backward passes between their marks out of a traced graph's calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypergpu.programs.container import NO_GRADIENT, BackwardRule, Graph, OperatorCall, ProgramError
from hypergpu.workloads.networks.custom_gradients import TracedGradient
from hypergpu.workloads.networks.graph_calls import (
    GradientMark,
    Item,
    PendingCall,
    RuleMark,
    Value,
    part_call,
    rule_call,
    without_dead,
)

Numbering = Callable[[Sequence[PendingCall], dict[Value, int]], tuple[OperatorCall, ...]]


@dataclass
class _Section:
    """The calls of one backward pass."""

    mark: GradientMark
    calls: list[PendingCall]


class RuleExtraction:
    """Rules of both graphs of a program, and the calls without them.

    Args:
        number_calls: Gives calls their numbers, from those of their inputs on.
    """

    def __init__(self, number_calls: Numbering) -> None:
        self.rules: list[BackwardRule] = []
        self._number_calls = number_calls
        self._hooked: dict[Value, Value] = {}

    def extract(
        self, items: Sequence[Item], gradients: Sequence[TracedGradient], outputs: list[Value]
    ) -> list[PendingCall]:
        """The calls of a graph; ``outputs`` are changed where a hook is about one.

        Raises:
            ProgramError: A backward pass uses what it cannot.
        """
        calls: list[PendingCall] = []
        self._hooked = {}
        section: _Section | None = None
        inner: dict[Value, TracedGradient] = {}
        for item in items:
            if isinstance(item, GradientMark):
                section = _Section(item, [])
                inner.update(dict.fromkeys(item.gradients, gradients[item.number]))
            elif isinstance(item, RuleMark):
                about = gradients[item.number]
                self._close(calls, section, item, about, outputs)
                section = None
            elif section is None or _can_leave(item, inner):
                _refuse_inner(item, inner)
                item.substitute(self._hooked)
                calls.append(item)
            else:
                section.calls.append(item)
                inner[item.result] = gradients[section.mark.number]
        return calls

    def _close(
        self,
        calls: list[PendingCall],
        section: _Section | None,
        mark: RuleMark,
        about: TracedGradient,
        outputs: list[Value],
    ) -> None:
        if section is None:
            raise AssertionError("a rule's mark has no begin")
        captured_values = self._add_rule(section, mark, about)
        if not about.is_hook:
            calls += self._calls_of(mark, captured_values, about)
            return
        new_calls = self._calls_of(mark, captured_values, about)
        place = _first_place(calls, mark.inputs)
        if {each.result for each in calls[place:]}.intersection(captured_values):
            raise ProgramError(
                f"{about.name} uses a value that is computed after its tensor ({about.line})."
                " Fix: register the hook where the tensor is made"
            )
        others = dict(zip(mark.inputs, mark.results, strict=True))
        for each in calls[place:]:
            each.substitute(others)
        outputs[:] = [others.get(each, each) for each in outputs]
        calls[place:place] = new_calls
        # A tensor's first hook is the first that its gradient meets: the nearest to its uses.
        self._hooked = {**others, **self._hooked}

    def _calls_of(
        self, mark: RuleMark, captured: list[Value], about: TracedGradient
    ) -> list[PendingCall]:
        call = rule_call(len(self.rules) - 1, mark, captured, about.line)
        if not about.is_hook:
            call.substitute(self._hooked)
        return [call, *(part_call(call, *each) for each in enumerate(mark.results))]

    def _add_rule(self, section: _Section, mark: RuleMark, about: TracedGradient) -> list[Value]:
        body = without_dead(section.calls, mark.gradients)
        own = {*section.mark.gradients, *(each.result for each in body)}
        used_values = [value for call in body for value in call.values]
        used_values += [value for value in mark.gradients if value is not None]
        captured_values = list(dict.fromkeys(value for value in used_values if value not in own))
        numbers = {
            value: number
            for number, value in enumerate([*section.mark.gradients, *captured_values])
        }
        graph_calls = self._number_calls(body, numbers)
        ends = tuple(NO_GRADIENT if each is None else numbers[each] for each in mark.gradients)
        count = len(section.mark.gradients)
        self.rules.append(BackwardRule(count, len(captured_values), Graph(graph_calls, ends)))
        return captured_values


def _refuse_inner(item: PendingCall, inner: dict[Value, TracedGradient]) -> None:
    for value in item.values:
        if value in inner:
            about = inner[value]
            raise ProgramError(
                f"what {about.name} computes is used outside of it ({about.line})."
                " Fix: compute it in the forward pass"
            )


def _can_leave(call: PendingCall, inner: dict[Value, TracedGradient]) -> bool:
    """Whether a call within a backward pass is about sizes of values outside of it."""
    return call.is_of_sizes and not any(value in inner for value in call.values)


def _first_place(calls: Sequence[PendingCall], values: Sequence[Value]) -> int:
    """Number of the first call after those that give these values."""
    places = [number for number, call in enumerate(calls, 1) if call.result in values]
    return max(places, default=0)
