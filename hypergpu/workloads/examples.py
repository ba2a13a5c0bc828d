"""Held-out samples as people are shown them."""

from typing import NamedTuple

from hypergpu.workloads.datasets import Array


class Example(NamedTuple):
    """A held-out sample for people; what it is not stays at its default."""

    text: str = ""
    image: Array | None = None
    """``uint8[height, width]``, or ``uint8[height, width, 3]``."""
    label: int | str = ""
    """The right answer: a class number, or text."""


def labelled_images(images: Array, labels: Array) -> list[Example]:
    """Images with their class numbers as examples."""
    return [
        Example(image=image, label=int(label)) for image, label in zip(images, labels, strict=True)
    ]
