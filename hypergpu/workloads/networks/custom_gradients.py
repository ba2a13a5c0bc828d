"""Gradients of a user's own while a model is traced: `torch.autograd.Function`, hooks of tensors,
and hooks of modules.

autograd would call them later, and a trace of the forward pass does not see them. Here they are
called at once with stand-ins of the gradients, between two marks in the graph: what they compute
becomes a backward rule of the program.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import BackwardHook, RemovableHandle

from hypergpu.programs.container import ProgramError
from hypergpu.workloads.networks.marks import GRAD, GRADIENTS, REQUIRES, RULE, mark
from hypergpu.workloads.networks.patching import replace_attribute
from hypergpu.workloads.networks.source_lines import CodeLine, called_line, raised_line, short

_HOOK_FIX = "Fix: compute the gradient from the given one with torch's operators alone"


class TracedGradient(NamedTuple):
    """One gradient of the user's own."""

    name: str
    """For messages, such as ``StraightThrough.backward``."""
    is_hook: bool
    """Whether all uses of its inputs get its results."""
    line: CodeLine | None


class _TracedContext(FunctionCtx):
    """What forward and backward of a function get as ``ctx``."""

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Nothing: no forward derivative is computed."""

    def mark_dirty(self, *tensors: Any) -> None:
        """Nothing: what the trace holds is compared with the module afterwards."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Nothing: gradients are always tensors here."""


class GradientRecorder:
    """Notes gradients of the user's own in the graph that is being traced.

    Args:
        parameter_hooks: Hooks of the model's parameters, by name.
    """

    def __init__(self, parameter_hooks: Mapping[str, Sequence[Callable[..., Any]]]) -> None:
        self.gradients: list[TracedGradient] = []
        self.hooked: list[Tensor] = []
        """Results of hooks. They must be outputs of the trace, or torch would drop them."""
        self._parameter_hooks = parameter_hooks
        self._arguments: dict[BackwardHook, tuple[Any, ...]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record them while a model runs."""
        patches: list[tuple[Any, str, Any]] = [
            (Tensor, "register_hook", _when_traced(self._hook_tensor, _REGISTER_HOOK)),
            (Tensor, "requires_grad_", _when_traced(_traced_requirement, _REQUIRE)),
            (torch.autograd, "grad", _when_traced(_traced_gradients, _GRAD)),
            (BackwardHook, "setup_input_hook", _when_traced(self._keep_inputs, _SETUP_INPUT)),
            (BackwardHook, "setup_output_hook", _when_traced(self._hook_outputs, _SETUP_OUTPUT)),
        ]
        patches += [
            (each, "forward", self._forward_of(each, each.forward))
            for each in _subclasses(torch.autograd.Function)
            if each.forward is not torch.autograd.Function.forward
        ]
        with ExitStack() as stack:
            for patch in patches:
                stack.enter_context(replace_attribute(*patch))
            yield

    def _hook_tensor(self, tensor: Tensor, hook: Callable[..., Any]) -> RemovableHandle:
        if not tensor.requires_grad:
            raise RuntimeError("a tensor that requires no gradient takes no hook")
        self.hook(tensor, hook)
        return RemovableHandle(OrderedDict())

    def _keep_inputs(self, hooks: BackwardHook, arguments: Any) -> Any:
        self._arguments[hooks] = _own_inputs(hooks, arguments)
        return self._arguments[hooks]

    def hook_parameters(self, model: nn.Module) -> None:
        """Record the hooks that parameters had before."""
        for name, parameter in model.named_parameters():
            for hook in self._parameter_hooks.get(name, ()):
                self.hook(parameter, hook)

    def hook(self, tensor: Tensor, hook: Callable[..., Any]) -> None:
        """Record a hook of a tensor."""
        name = getattr(hook, "__qualname__", type(hook).__name__)
        (result,) = self._record(
            TracedGradient(f"hook {name}", is_hook=True, line=called_line()),
            [tensor],
            [tensor],
            lambda gradients: [_first_tensor(hook(*gradients), gradients[0])],
        )
        self.hooked.append(result)

    def _hook_outputs(self, hooks: BackwardHook, result: Any) -> Any:
        """Record a module's backward hooks, once its outputs are known."""
        values = [result] if isinstance(result, Tensor) else list(result)
        places = [number for number, each in enumerate(values) if _is_trained(each)]
        if not places:
            return result
        outputs = [values[number] for number in places]
        output_gradients: list[Tensor] = []

        def compute_outputs(gradients: list[Tensor]) -> list[Tensor | None]:
            spread_gradients = _spread(gradients, places, len(values))
            for hook in hooks.user_pre_hooks:
                spread_gradients = hook(hooks.module, spread_gradients) or spread_gradients
            output_gradients.extend(spread_gradients)
            return [spread_gradients[number] for number in places]

        name = f"backward hook of {type(hooks.module).__name__}"
        about = TracedGradient(name, is_hook=False, line=called_line())
        attached_outputs = self._record(about, outputs, outputs, compute_outputs)
        self._hook_inputs(hooks, about, tuple(output_gradients))
        for number, each in zip(places, attached_outputs, strict=True):
            values[number] = each
        return values[0] if isinstance(result, Tensor) else type(result)(values)

    def _hook_inputs(
        self, hooks: BackwardHook, about: TracedGradient, grad_outputs: tuple[Tensor, ...]
    ) -> None:
        arguments = self._arguments[hooks]
        places = [number for number, each in enumerate(arguments) if _is_trained(each)]
        if not places or not hooks.user_hooks:
            return
        inputs = [arguments[number] for number in places]

        def compute_inputs(gradients: list[Tensor]) -> list[Tensor | None]:
            spread_gradients = _spread(gradients, places, len(arguments))
            for hook in hooks.user_hooks:
                spread_gradients = (
                    hook(hooks.module, spread_gradients, grad_outputs) or spread_gradients
                )
            return [spread_gradients[number] for number in places]

        self.hooked += self._record(about._replace(is_hook=True), inputs, inputs, compute_inputs)

    def _forward_of(self, function: Any, original: Callable[..., Any]) -> Any:
        if function is CheckpointFunction:
            return staticmethod(_when_traced(_run_checkpointed, original))
        has_context = function.setup_context is torch.autograd.Function.setup_context

        def forward(*given: Any) -> Any:
            real, arguments = (given[0], given[1:]) if has_context else (None, given)
            return self._apply(function, original, real, arguments)

        return staticmethod(_when_traced(forward, original))

    def _apply(self, function: Any, original: Any, real: Any, arguments: Sequence[Any]) -> Any:
        """Run a function's forward pass and, where gradients flow, its backward pass."""
        context = _TracedContext([_is_trained(each) for each in arguments])

        def compute_forward() -> Any:
            if real is not None:
                return original(context, *arguments)
            result = original(*arguments)
            function.setup_context(context, tuple(arguments), result)
            return result

        is_graded = traced_grad_mode()
        with _without_gradients():
            result = compute_forward()
        if real is not None:
            real.mark_non_differentiable(*context.non_differentiable)
        inputs = [each for each in arguments if _is_trained(each)]
        values = list(result) if isinstance(result, tuple | list) else [result]
        places = [number for number, each in enumerate(values) if _is_output(each, context)]
        if not (is_graded and inputs and places):
            return result

        def compute_backward(gradients: list[Tensor]) -> list[Tensor | None]:
            spread = [
                torch.zeros_like(each) if isinstance(each, Tensor) else None for each in values
            ]
            for number, gradient in zip(places, gradients, strict=True):
                spread[number] = gradient
            is_overridden = function.backward is not torch.autograd.Function.backward
            backward = function.backward if is_overridden else function.vjp
            input_gradients = backward(context, *spread)
            input_gradients = (
                input_gradients if isinstance(input_gradients, tuple | list) else (input_gradients,)
            )
            trained_gradients = [
                input_gradients[number]
                for number, each in enumerate(arguments)
                if _is_trained(each)
            ]
            return [each if isinstance(each, Tensor) else None for each in trained_gradients]

        name = f"{function.__name__}.backward"
        about = TracedGradient(name, is_hook=False, line=called_line())
        outputs = [values[number] for number in places]
        attached_outputs = self._record(about, inputs, outputs, compute_backward)
        for number, each in zip(places, attached_outputs, strict=True):
            values[number] = each
        return type(result)(values) if isinstance(result, tuple | list) else values[0]

    def _record(
        self,
        about: TracedGradient,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        compute: Callable[[list[Tensor]], list[Tensor | None]],
    ) -> list[Tensor]:
        """Compute a backward pass between its marks, and give the outputs that have it."""
        number = len(self.gradients)
        self.gradients.append(about)
        with _without_gradients():
            stand_ins = mark(GRADIENTS)(list(outputs), number)
            try:
                gradients = compute(list(stand_ins))
            except ProgramError:
                raise
            except Exception as error:  # it is the user's code
                raise _refusal(about, error) from error
            attached_outputs: list[Tensor] = mark(RULE)(
                list(inputs), list(outputs), gradients, number
            )
        return attached_outputs


def _refusal(about: TracedGradient, error: Exception) -> ProgramError:
    line = raised_line(error) or about.line
    if "ata-dependent" in str(error):
        return ProgramError(
            f"in {about.name} Python decides by a tensor's values ({line}). Fix: write torch.where"
        )
    text = f"{type(error).__name__}: {short(str(error))}"
    return ProgramError(f"{about.name} cannot be traced ({line}): {text}. {_HOOK_FIX}")


def traced_grad_mode() -> bool:
    """Whether gradients flow in the graph that is being traced. A function's forward pass always
    runs without, and the graph does not say so.
    """
    mode = _proxy_mode()
    if mode is None:
        return torch.is_grad_enabled()
    for node in reversed(mode.tracer.graph.nodes):
        if node.target is torch._C._set_grad_enabled:  # noqa: SLF001 - the graph's own mark
            return bool(node.args[0])
    return True


def _when_traced(own: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """The one function where this thread is tracing, else the other: all threads see patches."""

    def call(*given: Any, **named: Any) -> Any:
        return (own if _proxy_mode() is not None else otherwise)(*given, **named)

    return call


def _proxy_mode() -> Any:
    from torch._ops import _get_dispatch_mode_pre_dispatch

    key = torch._C._TorchDispatchModeKey.PROXY  # noqa: SLF001 - it has no public name
    return _get_dispatch_mode_pre_dispatch(key)  # type: ignore[no-untyped-call]


@contextmanager
def _without_gradients() -> Iterator[None]:
    """Note in the graph that no gradients flow, and afterwards that they flow as before."""
    before = traced_grad_mode()
    torch._C._set_grad_enabled(False)  # noqa: SLF001 - the graph's own mark
    try:
        yield
    finally:
        torch._C._set_grad_enabled(before)  # noqa: SLF001


def _run_checkpointed(ctx: Any, function: Any, preserves: bool, *arguments: Any) -> Any:
    """A reentrant checkpoint computes its function's gradients, where an argument has one."""
    if traced_grad_mode() and any(_is_trained(each) for each in arguments):
        torch._C._set_grad_enabled(True)  # noqa: SLF001 - the graph's own mark
        return function(*arguments)
    with _without_gradients():
        return function(*arguments)


def _traced_gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **named: Any,
) -> tuple[Tensor, ...]:
    """As torch.autograd.grad, which nodes call then."""
    ends = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    starts = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    end_gradients = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs or ())
    if allow_unused or named:
        raise ProgramError(
            f"torch.autograd.grad with allow_unused ({called_line()}) gives what a program cannot."
            " Fix: take gradients of tensors that the output depends on"
        )
    if not end_gradients:
        with _without_gradients():
            end_gradients = [torch.ones_like(each) for each in ends]
    gradients = mark(GRAD)(ends, starts, end_gradients, create_graph)
    return tuple(each.requires_grad_() if create_graph else each for each in gradients)


def _traced_requirement(tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """As Tensor.requires_grad_, with a mark of it."""
    if requires_grad and not tensor.requires_grad:
        mark(REQUIRES)(tensor)
    return _REQUIRE(tensor, requires_grad)


# As torch has them, for other threads while one traces.
_REQUIRE = Tensor.requires_grad_
_GRAD = torch.autograd.grad
_REGISTER_HOOK: Callable[..., Any] = Tensor.register_hook
_SETUP_INPUT: Callable[..., Any] = BackwardHook.setup_input_hook
_SETUP_OUTPUT: Callable[..., Any] = BackwardHook.setup_output_hook


def _own_inputs(hooks: BackwardHook, arguments: Any) -> tuple[Any, ...]:
    """Give a module inputs of its own, which its backward hooks are about."""
    return tuple(
        each.view_as(each) if _is_trained(each) and hooks.user_hooks else each for each in arguments
    )


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_output(value: Any, context: _TracedContext) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.is_floating_point() or value.is_complex())
        and not any(value is each for each in context.non_differentiable)
    )


def _spread(values: Sequence[Any], places: Sequence[int], count: int) -> tuple[Any, ...]:
    spread: list[Any] = [None] * count
    for number, value in zip(places, values, strict=True):
        spread[number] = value
    return tuple(spread)


def _first_tensor(value: Any, otherwise: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else otherwise


def _subclasses(kind: Any) -> Iterable[Any]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)
