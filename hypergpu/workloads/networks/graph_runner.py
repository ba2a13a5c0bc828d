"""Runs a program's graphs call by call with torch.

The calls are torch's own operators, as an eager model would make them, so that autograd, autocast
and every device work alike.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hypergpu.programs.container import (
    NO_GRADIENT,
    Argument,
    BackwardRule,
    Graph,
    OperatorCall,
    ProgramBoundError,
    ProgramError,
    value_numbers,
)
from hypergpu.programs.numbers import NUMBER_FUNCTIONS, check_parts
from hypergpu.programs.operators import ATEN, CUSTOM_GRADIENT, GRADIENT, REQUIRES_GRAD
from hypergpu.workloads.networks.memory_bound import AliveBytes
from hypergpu.workloads.networks.size_bounds import BOUNDS, PARTS

META = torch.device("meta")


class Observer(Protocol):
    """Sees each result of a graph's calls."""

    def add(self, value: Any) -> None:
        """A call gave it."""

    def drop(self, value: Any) -> None:
        """No later call needs it."""


def function_of(name: str) -> Callable[..., Any]:
    """The function of an allowed operator.

    Raises:
        ProgramError: This version of torch has no such operator.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    space, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    try:
        function: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), base), overload)
    except AttributeError:
        raise ProgramError(
            f"torch {torch.__version__} here has no operator {name}: install a newer one"
        ) from None
    return function


def lacking_operators() -> tuple[str, ...]:
    """Operators of programs that this version of torch has not."""
    missing_names = []
    for name in sorted(ATEN):
        try:
            function_of(name)
        except ProgramError:
            missing_names.append(name)
    return tuple(missing_names)


def _gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], given: Sequence[Tensor], keeps: bool
) -> list[Tensor]:
    """Gradients of ``outputs``, themselves with a graph if ``keeps``."""
    if outputs[0].device == META:
        return [torch.empty_like(each) for each in inputs]
    gradients: tuple[Tensor, ...] = torch.autograd.grad(
        list(outputs), list(inputs), list(given), retain_graph=True, create_graph=bool(keeps)
    )
    return list(gradients)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {**NUMBER_FUNCTIONS, GRADIENT: _gradients_of, REQUIRES_GRAD: Tensor.requires_grad_}
)


class _Slot(NamedTuple):
    """Place of an argument that is known at the call only."""

    number: int


class _DeviceSlot(NamedTuple):
    """Place of the device that the program runs on."""


def _plain(argument: Argument) -> Any:
    """An argument as torch takes it; slots where a value belongs."""
    if isinstance(argument, list | tuple):
        return [_plain(each) for each in argument]
    if not isinstance(argument, dict):
        return argument
    ((key, value),) = argument.items()
    if key == "value":
        return _Slot(value)
    if key == "device":
        return _DeviceSlot()
    return float(value) if key == "number" else getattr(torch, value)


def _fill(argument: Any, values: Sequence[Any], device: torch.device) -> Any:
    kind = type(argument)
    if kind is _Slot:
        return values[argument.number]
    if kind is list:
        return [_fill(each, values, device) for each in argument]
    return device if kind is _DeviceSlot else argument


class _Step(NamedTuple):
    """A call made ready."""

    operator: str
    function: Callable[..., Any]
    arguments: list[Any]
    named: dict[str, Any]
    is_graded: bool
    dead: tuple[int, ...]
    """Values that no later call needs."""

    def run(self, values: list[Any], device: torch.device) -> Any:
        arguments = [_fill(each, values, device) for each in self.arguments]
        keywords = {key: _fill(each, values, device) for key, each in self.named.items()}
        function = self.function
        if self.operator in PARTS:
            check_parts(PARTS[self.operator](*arguments, **keywords))
        if device.type == "meta":
            function = BOUNDS.get(self.operator, function)
        if self.is_graded:
            return function(*arguments, **keywords)
        with torch.no_grad():
            return function(*arguments, **keywords)


class ReadyGraph:
    """A graph with its functions looked up.

    Args:
        name: For messages.
        graph: What it runs.
        inputs_count: Number of values before the first result.
        rules: Gradients that its calls of `CUSTOM_GRADIENT` name.

    Raises:
        ProgramError: torch lacks an operator.
    """

    def __init__(
        self, name: str, graph: Graph, inputs_count: int, rules: Sequence["ReadyRule"] = ()
    ) -> None:
        self._name = name
        self._outputs = graph.outputs
        self._takes_gradients = any(call.operator == GRADIENT for call in graph.calls)
        dead = _last_uses(graph, inputs_count)
        self._steps = [_ready(call, dead[number], rules) for number, call in enumerate(graph.calls)]

    def run(
        self, inputs: Sequence[Any], device: torch.device, observer: Observer | None = None
    ) -> list[Any]:
        """The outputs; None in place of `NO_GRADIENT`.

        Args:
            inputs: The graph's.
            device: Where they are.
            observer: None: nobody looks.

        Raises:
            ProgramError: A call failed by more than torch's own words. Its errors of computing,
                lack of memory among them, are passed on as they are.
        """
        if self._takes_gradients and not torch.is_grad_enabled():
            with torch.inference_mode(mode=False), torch.enable_grad():
                plain_inputs = [_outside_inference(each) for each in inputs]
                return [_plain_result(each) for each in self.run(plain_inputs, device, observer)]
        values: list[Any] = list(inputs)
        for number, step in enumerate(self._steps):
            try:
                value = step.run(values, device)
                if observer is not None:
                    observer.add(value)
            except (MemoryError, RuntimeError) as error:
                error.add_note(f"{self._name}, call {number} ({step.operator})")
                raise
            except Exception as error:
                raise self._failure(number, error) from error
            values.append(value)
            for index in step.dead:
                if observer is not None:
                    observer.drop(values[index])
                values[index] = None
        return [None if number == NO_GRADIENT else values[number] for number in self._outputs]

    def try_run(self, inputs: Sequence[Any], observer: Observer) -> list[Any]:
        """Run it on tensors that hold nothing.

        Raises:
            ProgramError: A call fails, or the observer refuses a result.
        """
        count = _CountingObserver(observer)
        try:
            return self.run(inputs, META, count)
        except ProgramError:
            raise
        except Exception as error:  # torch raises anything for wrong arguments
            raise self._failure(count.done, error) from error

    def _failure(self, number: int, error: Exception) -> ProgramError:
        operator = self._steps[min(number, len(self._steps) - 1)].operator
        kind = type(error) if isinstance(error, ProgramBoundError) else ProgramError
        return kind(
            f"{self._name}, call {number} ({operator}): {_first_line(error)}", (self._name, number)
        )


_NOTE = re.compile(r"(train|evaluate|evaluate_all), call (\d+) \(.*")


def failed_call(error: BaseException) -> tuple[str, int] | None:
    """Graph and number of the call that an error of torch came from; None: it came from none."""
    matches = (_NOTE.fullmatch(note) for note in getattr(error, "__notes__", ()))
    return next(((each[1], int(each[2])) for each in matches if each), None)


def _outside_inference(value: Any) -> Any:
    """A tensor of which gradients can be noted."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _plain_result(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0] or "it failed"
    is_named = isinstance(error, ProgramError | RuntimeError | ValueError)
    text = text if is_named else f"{type(error).__name__}: {text}"
    return text if len(text) <= 300 else text[:300].rpartition(" ")[0] + " ..."


class _CountingObserver:
    """Counts a graph's results on their way to another observer."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.done = 0

    def add(self, value: Any) -> None:
        """See `Observer`."""
        self._observer.add(value)
        self.done += 1

    def drop(self, value: Any) -> None:
        """See `Observer`."""
        self._observer.drop(value)


class ReadyRule:
    """A backward graph with its functions looked up."""

    def __init__(self, number: int, rule: BackwardRule) -> None:
        self.graph = ReadyGraph(f"rule {number}", rule.graph, rule.inputs_count)

    def attach(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], captured: Sequence[Any]
    ) -> list[Tensor]:
        """The outputs of a function of the inputs whose gradient is this rule's."""
        if outputs[0].device == META:
            self._check(inputs, outputs, captured)
        tensors = [each.detach() for each in captured if isinstance(each, Tensor)]
        others = [None if isinstance(each, Tensor) else each for each in captured]
        plain = [each.detach() for each in outputs]
        call = _AttachedCall(self, others, len(inputs), len(plain))
        attached_outputs: tuple[Tensor, ...] = _CustomGradient.apply(
            call, *inputs, *plain, *tensors
        )
        return list(attached_outputs)

    def _check(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], captured: Sequence[Any]
    ) -> None:
        """Find wrong and huge results of the backward graph without data.

        Raises:
            ProgramError: A call fails, or a gradient has not its input's shape.
        """
        gradients = [torch.empty_like(each) for each in outputs]
        input_gradients = self.graph.try_run([*gradients, *captured], AliveBytes())
        for number, (gradient, value) in enumerate(zip(input_gradients, inputs, strict=True)):
            if gradient is None:
                continue
            if not isinstance(gradient, Tensor) or gradient.shape != value.shape:
                shape = list(gradient.shape) if isinstance(gradient, Tensor) else "no tensor"
                raise ProgramError(
                    f"the gradient of input {number} is {shape}, the input {list(value.shape)}"
                )


class _AttachedCall(NamedTuple):
    """One use of a rule."""

    rule: ReadyRule
    captured: list[Any]
    """Numbers, and None in place of tensors."""
    inputs: int
    outputs: int


class _CustomGradient(torch.autograd.Function):
    """Passes outputs through, and computes gradients by a rule."""

    @staticmethod
    def forward(ctx: Any, call: _AttachedCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        end = call.inputs + call.outputs
        ctx.call, ctx.count = call, len(tensors)
        ctx.save_for_backward(*tensors[end:])
        kind = tensors[0].device.type
        ctx.device_type = kind
        ctx.is_autocast = tensors[0].device != META and torch.is_autocast_enabled(kind)
        ctx.autocast_dtype = torch.get_autocast_dtype(kind) if ctx.is_autocast else None
        return tuple(each.view_as(each) for each in tensors[call.inputs : end])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        captured_values = [next(tensors) if each is None else each for each in ctx.call.captured]
        autocast = torch.autocast(
            ctx.device_type, dtype=ctx.autocast_dtype, enabled=ctx.is_autocast
        )
        # As it was in the forward pass: captured values may be of the lower precision.
        with autocast:
            input_gradients = ctx.call.rule.graph.run(
                [*gradients, *captured_values], gradients[0].device
            )
        return (None, *input_gradients, *[None] * (ctx.count - ctx.call.inputs))


def _ready(call: OperatorCall, dead: tuple[int, ...], rules: Sequence[ReadyRule]) -> _Step:
    keywords = {key: _plain(each) for key, each in call.named.items()}
    arguments = [_plain(each) for each in call.arguments]
    if call.operator == CUSTOM_GRADIENT:
        rule = rules[arguments[0]]
        return _Step(call.operator, rule.attach, arguments[1:], {}, call.is_graded, dead)
    function = function_of(call.operator)
    if _creates(function):
        # Where the program runs, also when it is only checked.
        keywords["device"] = _DeviceSlot()
    return _Step(call.operator, function, arguments, keywords, call.is_graded, dead)


def _creates(function: Callable[..., Any]) -> bool:
    """Whether an operator makes a tensor of plain values alone."""
    if not isinstance(function, torch._ops.OpOverload):  # noqa: SLF001 - it has no public name
        return False
    types = {each.name: str(each.type) for each in function._schema.arguments}  # noqa: SLF001
    return "device" in types and not any("Tensor" in each for each in types.values())


def _last_uses(graph: Graph, inputs_count: int) -> list[tuple[int, ...]]:
    """For each call the results that are used there for the last time."""
    last: dict[int, int] = {}
    for number, call in enumerate(graph.calls):
        last[inputs_count + number] = number
        for value in value_numbers([*call.arguments, *call.named.values()]):
            last[value] = number
    ends: list[list[int]] = [[] for _ in graph.calls]
    for value, number in last.items():
        if value >= inputs_count and value not in graph.outputs:
            ends[number].append(value)
    return [tuple(each) for each in ends]
