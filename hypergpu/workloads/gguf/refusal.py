"""What no GGUF file is written of."""


class GgufRefusalError(Exception):
    """The model is not written as GGUF. The text names what stands in the way, and the fix."""
