"""What no GGUF file is written of, and which files are not read."""


class GgufRefusalError(Exception):
    """The model is not written as GGUF, or not read. The text names what stands in the way, and the
    fix.
    """


def file_refusal(detail: str) -> GgufRefusalError:
    """The refusal of a file that states what transformers' model would not have."""
    return GgufRefusalError(f"{detail}. Fix: give the folder of the model as transformers has it")
