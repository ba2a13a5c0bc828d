"""torchvision's networks fitted to image datasets."""

from functools import partial

import torch
from torch import Tensor, nn
from torchvision.models import resnet18, vgg11_bn

from hypergpu.workloads.datasets import Array
from hypergpu.workloads.entry import Options
from hypergpu.workloads.networks.image_data import read_cifar10, read_mnist
from hypergpu.workloads.networks.image_decoding import ImageForm
from hypergpu.workloads.networks.image_folder import held_out_folder, node_pictures, read_folder
from hypergpu.workloads.networks.task import Classification
from hypergpu.workloads.node_data import NodeDataReaders

_IMAGENET_SIDE = 96
"""From this size on, the networks keep the first layers they have for ImageNet."""


def _resnet18(classes: int, image_size: int) -> nn.Module:
    model: nn.Module = resnet18(num_classes=classes)
    if image_size < _IMAGENET_SIDE:
        # He et al. 2016 (section 4.2): small images lose too much in the 7 x 7 stride and the
        # pooling.
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return model


def _vgg11(classes: int, image_size: int) -> nn.Module:
    model: nn.Module = vgg11_bn(num_classes=classes)
    if image_size < _IMAGENET_SIDE:
        # Five poolings leave one place, for which the 120M weights of the ImageNet head are
        # pointless.
        model.avgpool = nn.AdaptiveAvgPool2d(1)
        model.classifier = nn.Linear(512, classes)
    return model


def _normalise(images: Tensor) -> Tensor:
    """``uint8`` grey values to about [-2, 2]."""
    return (images.float() - 127.5) / 64


def _shifted_and_mirrored(images: Tensor) -> Tensor:
    """Each image moved by up to an eighth and mirrored half of the time, drawn from torch's
    generator.
    """
    batch, _, side, _ = images.shape
    reach = max(side // 8, 1)
    padded_images = nn.functional.pad(images, (reach, reach, reach, reach))
    offsets = torch.randint(0, 2 * reach + 1, (batch, 2))
    is_mirrored = torch.rand(batch) < 0.5
    moved_images = [
        padded_images[i, :, y : y + side, x : x + side].flip(2)
        if is_mirrored[i]
        else padded_images[i, :, y : y + side, x : x + side]
        for i, (y, x) in enumerate(offsets.tolist())
    ]
    return torch.stack(moved_images)


def drawn_images(images: Array) -> Array:
    """``uint8[b, channels, height, width]`` as images for people."""
    return images[:, 0] if images.shape[1] == 1 else images.transpose(0, 2, 3, 1)


def _augmentation(options: Options) -> partial[Tensor] | None:
    return partial(_shifted_and_mirrored) if options["augment"] else None


def mnist_cnn(options: Options) -> Classification:
    """Builder of ``mnist-cnn``: three convolutions, group normalisation and a hidden layer."""
    channels = int(options["channels"])

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, channels, 5, padding=2, stride=2),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2),
            nn.GroupNorm(4, 2 * channels),
            nn.ReLU(),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * channels, 4 * channels),
            nn.ReLU(),
            nn.Linear(4 * channels, 10),
        )

    return Classification(make, read_mnist, prepare=_normalise, draw=drawn_images)


def cifar10_resnet18(options: Options) -> Classification:
    """Builder of ``cifar10-resnet18``."""
    make = partial(_resnet18, 10, 32)
    return Classification(
        make, read_cifar10, prepare=_normalise, augment=_augmentation(options), draw=drawn_images
    )


def cifar10_vgg11(options: Options) -> Classification:
    """Builder of ``cifar10-vgg11``."""
    make = partial(_vgg11, 10, 32)
    return Classification(
        make, read_cifar10, prepare=_normalise, augment=_augmentation(options), draw=drawn_images
    )


def _folder(options: Options, network: str) -> Classification:
    classes, image_size = int(options["classes"]), int(options["image_size"])
    make = partial(_resnet18 if network == "resnet18" else _vgg11, classes, image_size)
    form = ImageForm(image_size, image_size)
    node_data = NodeDataReaders(
        partial(held_out_folder, classes=classes, form=form),
        partial(node_pictures, form=form),
    )
    return Classification(
        make,
        partial(read_folder, classes=classes, form=form),
        prepare=_normalise,
        augment=_augmentation(options),
        draw=drawn_images,
        node_data=node_data,
    )


def folder_resnet18(options: Options) -> Classification:
    """Builder of ``imagefolder-resnet18``."""
    return _folder(options, "resnet18")


def folder_vgg11(options: Options) -> Classification:
    """Builder of ``imagefolder-vgg11``."""
    return _folder(options, "vgg11")
