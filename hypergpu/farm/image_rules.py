"""How pictures are made of prompts: what the settings of the kind ``image`` come to."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from hypergpu.farm.png_images import SIDE_MOST

STEPS_MOST = 1_000
_PIXEL_BYTES = 4
"""Bytes of a pixel at most: PNG that cannot be made smaller, in base64."""
_HEAD_BYTES = 65_536
_MEGA = 1_000_000


class ImageRules(NamedTuple):
    """How a picture is made. What the base's pipeline has no word for is left out."""

    width: int = 512
    height: int = 512
    steps: int = 20
    further: Mapping[str, Any] = {}
    """Further settings, where the job states them: ``guidance_scale``, ``negative_prompt``."""

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> "ImageRules":
        """Those that parameters state.

        Raises:
            ValueError: A value is none that may be.
        """
        numbers = {name: parameters.get(name, cls._field_defaults[name]) for name in _NUMBERS}
        for name, value in numbers.items():
            most, step = _NUMBERS[name]
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if not is_whole or not 0 < value <= most or value % step:
                rule = f"a multiple of {step} of" if step > 1 else "a whole number of"
                raise ValueError(f"{name} of image is {value!r}: {rule} {step} to {most}")
        further = {name: parameters[name] for name in _FURTHER if name in parameters}
        scale = further.get("guidance_scale", 1.0)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale <= 100:
            raise ValueError(f"guidance_scale of image is {scale!r}: a number of 0 to 100")
        negative_prompt = further.get("negative_prompt", "")
        if str(negative_prompt) != negative_prompt:
            raise ValueError(f"negative_prompt of image is {negative_prompt!r}, and no text")
        return cls(**numbers, further=further)

    @property
    def megapixel_steps_most(self) -> int:
        """Units of a picture, rounded up."""
        return -(-self.width * self.height * self.steps // _MEGA)

    @property
    def result_bytes_most(self) -> int:
        """Size of a picture's result at most."""
        return _HEAD_BYTES + _PIXEL_BYTES * self.width * self.height


_NUMBERS = {"width": (SIDE_MOST, 8), "height": (SIDE_MOST, 8), "steps": (STEPS_MOST, 1)}
"""Largest value of a setting, and what it is a multiple of."""
_FURTHER = ("guidance_scale", "negative_prompt")
IMAGE_SETTINGS = frozenset({*_NUMBERS, *_FURTHER})
