"""Which build of PyTorch runs on which machine, as the arguments of pip.

Sources: PyTorch's matrix of CUDA versions against architectures (RELEASE.md) and its announcements:
builds for CUDA 12.8 and later lack Maxwell and Pascal since 2.8, and Volta since 2.11; 2.14 is the
last release with builds for CUDA 12.6, which have all three. docs/install.md says it for people.
"""

from collections.abc import Sequence

INDEX = "https://download.pytorch.org/whl"
REQUIREMENTS = ("torch>=2.6", "torchvision>=0.21", "pillow>=10")
LEGACY = ("torch>=2.10,<2.15", "torchvision", "pillow>=10", "--index-url", f"{INDEX}/cu126")
"""For cards before Turing: the last releases that have a build for CUDA 12.6."""
PROCESSOR = (*REQUIREMENTS, "--extra-index-url", f"{INDEX}/cpu")
"""A tenth of the size. Where that index does not answer, the usual build does the same."""
OLDEST, _TURING = (5, 0), (7, 5)
"""Compute capabilities: of the oldest cards that have a build, and of the first that need none of
their own."""


def version_of(architecture: str) -> tuple[int, int]:
    """Major and minor number in a name such as ``sm_61``; zeros: it has none."""
    digits = "".join(each for each in architecture.partition("_")[2] if each.isdecimal())
    return (int(digits[:-1]), int(digits[-1])) if len(digits) > 1 else (0, 0)


def is_legacy(capability: str) -> bool:
    """Whether only builds for CUDA 12.6 run on a card: Maxwell, Pascal and Volta."""
    return OLDEST <= version_of(capability) < _TURING


def torch_arguments(
    capabilities: Sequence[str], *, has_nvidia: bool, platform: str
) -> tuple[str, ...]:
    """Arguments of `pip install` for the build that suits a machine.

    Args:
        capabilities: Of its NVIDIA cards, such as ``sm_61``; empty where none can be asked.
        has_nvidia: Whether it has such a card.
        platform: As `sys.platform` names it.
    """
    if any(map(is_legacy, capabilities)):
        return LEGACY
    if not has_nvidia and platform == "linux":
        return PROCESSOR
    return REQUIREMENTS
