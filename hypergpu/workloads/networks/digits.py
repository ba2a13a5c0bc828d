"""Networks for the 8 x 8 digits."""

from torch import Tensor, nn

from hypergpu.workloads.digits.load import CLASSES, PIXELS, digits
from hypergpu.workloads.entry import OptionError, Options
from hypergpu.workloads.networks.task import Classification
from hypergpu.workloads.workload import Dataset


def _read(_data_dir: str) -> Dataset:
    return digits()


def _as_images(inputs: Tensor) -> Tensor:
    return inputs.view(-1, 1, 8, 8)


def mlp(options: Options) -> Classification:
    """Builder of ``digits-mlp``: two hidden layers."""
    width = int(options["width"])

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(PIXELS, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )

    return Classification(make, _read)


def cnn(options: Options) -> Classification:
    """Builder of ``digits-cnn``: three convolutions with group normalisation and a hidden layer.

    Group normalisation has no running statistics to average between nodes. Nearly all weights lie
    in tensors of 4,096 elements or more, which the codecs compress.
    """
    channels = int(options["channels"])
    if channels % 4:
        raise OptionError(f"options.channels is {channels}; it must be a multiple of 4")

    def make() -> nn.Module:
        return nn.Sequential(
            *_convolution(1, channels),
            nn.MaxPool2d(2),
            *_convolution(channels, 2 * channels),
            *_convolution(2 * channels, 2 * channels),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * channels, 4 * channels),
            nn.ReLU(),
            nn.Linear(4 * channels, CLASSES),
        )

    return Classification(make, _read, prepare=_as_images)


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()
