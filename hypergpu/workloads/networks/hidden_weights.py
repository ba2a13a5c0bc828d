"""Which of a network's parameters Muon steps: the weights of its layers before the last.

Embeddings, the output layer, norms, biases and whatever is no layer's weight are AdamW's. A row of
an embedding or of an output layer belongs to one word or class, and to make all singular values
alike moves rare ones as far as frequent ones. The first layer of numbers is a hidden one: with
AdamW there, a perceptron of digits takes twice the samples.
"""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.conv import _ConvNd

from hypergpu.optimizer import before_last

_LAYERS = (nn.Linear, _ConvNd, nn.Embedding, nn.MultiheadAttention)
_ATTRIBUTE = "hidden_weights"


def hidden_weights(model: nn.Module) -> frozenset[str]:
    """Names of a network's hidden weights, as its parameters are named.

    A network that states them in an attribute ``hidden_weights`` knows more of its forward pass
    than the order of its modules tells, such as an output layer that is the embedding again.
    """
    own_names: object = getattr(model, _ATTRIBUTE, None)
    if isinstance(own_names, frozenset):
        return own_names
    names = {parameter: name for name, parameter in model.named_parameters()}
    return before_last(_layers(model, names))


def _layers(model: nn.Module, names: dict[nn.Parameter, str]) -> Iterator[str | None]:
    """The weight of each layer in the order of definition; None: it is no hidden one."""
    earlier_parameters: set[nn.Parameter] = set()
    for module in model.modules():
        if not isinstance(module, _LAYERS):
            continue
        for weight in _weights(module):
            is_hidden = (
                weight in names and weight not in earlier_parameters and weight.requires_grad
            )
            earlier_parameters.add(weight)
            yield names[weight] if is_hidden and not isinstance(module, nn.Embedding) else None


def _weights(layer: nn.Module) -> list[nn.Parameter]:
    """A layer's own parameters of two axes and more."""
    return [weight for weight in layer.parameters(recurse=False) if weight.ndim >= 2]
