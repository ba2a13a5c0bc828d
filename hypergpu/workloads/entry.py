"""Descriptions of workloads, checks of their options, and the workloads that come with HyperGPU.

Plain data; `hypergpu.workloads.registry` builds what they name.
"""

import importlib.util
import math
from collections.abc import Mapping

import msgspec

_NUMBER_MOST = 10**18
Value = str | int | float | bool
Options = Mapping[str, Value]


WORKLOAD_FIELD = "hypergpu.workload"
OPTIONS_FIELD = "hypergpu.options"
"""Metadata of an exported model: its workload's name, and the options as JSON."""
NODE_DATA_FIELD = "hypergpu.node_data"
"""The data set that it was trained on, where that stayed on nodes."""


class OptionError(ValueError):
    """An option is unknown or has an impossible value. The text names it, what is wrong and what is
    right.

    Args:
        text: For people.
        fix: One change that makes it right.
    """

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(text)
        self.fix = fix


class Option(msgspec.Struct, frozen=True):
    """One setting of a workload. The default's type is the option's type."""

    name: str
    default: Value
    meaning: str
    minimum: float | None = None
    maximum: float | None = None
    multiple_of: int = 1
    divides: str = ""
    """Another option that this one must divide."""
    choices: tuple[str, ...] = ()
    """The only texts there are; empty: any."""


class WorkloadEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a workload. Importing one never imports torch."""

    name: str
    dataset: str
    meaning: str
    builder: str
    """``package.module:function``; called with the complete options, it returns a
    `workload.Workload`.
    """
    version: int = 1
    """Raised whenever the same options would train something else: nodes of another version take no
    part.
    """
    oldest_version: int = 0
    """The oldest version whose jobs this one trains alike; 0: only its own."""
    kind: str = "torch"
    """``torch``, ``numpy`` or ``null``: the worker it needs."""
    metric: str = "accuracy"
    """``accuracy`` and the like: a mean score, higher is better; ``perplexity``: lower is better.
    See `hypergpu.workloads.metrics`.
    """
    options: tuple[Option, ...] = ()
    takes_data: str = "never"
    """Whether a user's folder replaces the dataset: ``never``, ``optional`` or ``required``."""
    takes_node_data: bool = False
    """Whether its samples may stay on the nodes that have them: see `NodeDataWorkload`."""
    needs: tuple[str, ...] = ()
    """Python modules beyond those of its kind: a node that lacks one does not offer the workload.
    """
    install: str = ""
    """What pip installs to have them, such as ``hypergpu[hf]``."""
    preprocessing: str = ""
    """Steps from a stored sample to the input of the model, for the card of an export."""
    split: str = ""
    """Rule by which samples are held out, for the card of an export."""
    exported_files: tuple[str, ...] = ()
    """Files of a job's data, by their paths in it, that an export carries beside the model."""
    can_checkpoint: bool = False
    """Whether its modules have ``checkpoint_activations``, by which they compute activations again
    in the backward pass rather than keep them.
    """


class HeldOutExample(msgspec.Struct, frozen=True, omit_defaults=True):
    """A held-out sample as people see it; each evaluation tells the model's output for it."""

    text: str = ""
    """The beginning of a text that the model goes on with, or a text that it judges."""
    image: bytes = b""
    """PNG of at most 32 x 32 pixels."""
    label: str = ""
    """The right answer, where there is one."""


OLDER_JOB_FIX = "hypergpu job continue JOB --rounds N, a new job from its model"
"""What helps a job of an older workload version than those that are installed."""


def trains_version(entry: WorkloadEntry, version: int) -> bool:
    """Whether a workload trains jobs of this version alike."""
    return (entry.oldest_version or entry.version) <= version <= entry.version


def missing_modules(entry: WorkloadEntry) -> tuple[str, ...]:
    """Modules that the workload needs and that are not installed here; none is imported."""
    return tuple(name for name in entry.needs if importlib.util.find_spec(name) is None)


def complete_options(entry: WorkloadEntry, given: Options) -> dict[str, Value]:
    """The given options checked, the others at their defaults, in the entry's order.

    Raises:
        OptionError: Says which option, what is wrong and what would be right.
    """
    known = {option.name: option for option in entry.options}
    for name in given:
        if name not in known:
            names = ", ".join(known) or "none"
            text = f"options.{name}: {entry.name} has no such option; it has: {names}"
            raise OptionError(text, f"leave options.{name} out")
    complete = {
        name: check_value(entry, name, given[name]) if name in given else option.default
        for name, option in known.items()
    }
    for option in entry.options:
        _check_divisors(entry, option, complete)
    return complete


def _check_divisors(entry: WorkloadEntry, option: Option, complete: Options) -> None:
    name, value, whole = option.name, complete[option.name], complete.get(option.divides, 0)
    if isinstance(value, bool) or not (isinstance(value, int) and isinstance(whole, int)):
        return
    said = f"options.{name} of {entry.name} is {value}"
    if value % option.multiple_of:
        multiple = max(1, round(value / option.multiple_of)) * option.multiple_of
        text = f"{said}; it must be a multiple of {option.multiple_of}"
        raise OptionError(text, f"options.{name} = {multiple}")
    if option.divides and whole % value:
        both = f"{said} and options.{option.divides} is {whole}"
        divisor = next(each for each in range(min(value, whole), 0, -1) if whole % each == 0)
        fix = f"options.{name} = {divisor}"
        raise OptionError(f"{both}; {name} must divide {option.divides}", fix)


def check_value(entry: WorkloadEntry, name: str, value: Value) -> Value:
    """A value of one of the entry's options, as the type of the option.

    Raises:
        OptionError: It is of another type or outside of its range. What it is beside others is for
            `complete_options` to judge.
    """
    (option,) = (each for each in entry.options if each.name == name)
    where = f"options.{option.name} of {entry.name}"
    wanted = type(option.default)
    if isinstance(value, int) and abs(value) > _NUMBER_MOST:
        text = f"{where} is a number of more than {len(str(_NUMBER_MOST)) - 1} digits"
        raise OptionError(text, _default_fix(name, option))
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise OptionError(
            f"{where} is {value!r}, a {type(value).__name__}; it must be a {wanted.__name__},"
            f" such as {option.default!r}",
            _default_fix(name, option),
        )
    if isinstance(value, str) and option.choices and value not in option.choices:
        text = f"{where} is {value[:40]!r}; it must be {' or '.join(option.choices)}"
        raise OptionError(text, _default_fix(name, option))
    if isinstance(value, str | bool):
        return value
    _check_number(option, where, value)
    return value


def _default_fix(name: str, option: Option) -> str:
    return f"options.{name} = {msgspec.json.encode(option.default).decode()}"


def _check_number(option: Option, where: str, value: float) -> None:
    if not math.isfinite(value):
        raise OptionError(f"{where} is not a number", _default_fix(option.name, option))
    if option.minimum is not None and value < option.minimum:
        text = f"{where} is {value}; it must be at least {option.minimum:g}"
        raise OptionError(text, f"options.{option.name} = {option.minimum:g}")
    if option.maximum is not None and value > option.maximum:
        text = f"{where} is {value}; it must be at most {option.maximum:g}"
        raise OptionError(text, f"options.{option.name} = {option.maximum:g}")


_CHANNELS = Option(
    "channels", 32, "Channels of the first convolution; a multiple of 4", 4, 512, multiple_of=4
)
_AUGMENT = Option("augment", True, "Shift and mirror training images")
_CLASSES = Option("classes", 10, "Sub-folders there are", 2, 100_000)
_IMAGE_SIZE = Option("image_size", 64, "Side in pixels that images are resized to", 16, 512)

_GREY = "values of 0 to 255 less 127.5, divided by 64"
_ROWS_SPLIT = "files named held_out, validation or test, else a tenth of the rows, drawn by class"

_DIGITS = (
    WorkloadEntry(
        name="digits-softmax",
        kind="numpy",
        dataset="digits",
        meaning="Softmax regression on 1,797 handwritten digits; needs no torch",
        builder="hypergpu.workloads.digits:digits_softmax",
        preprocessing="grey values of 0 to 16 are divided by 16",
        split="a fifth of each digit is held out, the same in every job",
    ),
    WorkloadEntry(
        name="digits-mlp",
        dataset="digits",
        meaning="A perceptron with two hidden layers on 1,797 handwritten digits",
        builder="hypergpu.workloads.networks.models:mlp",
        preprocessing="grey values of 0 to 16 are divided by 16",
        split="a fifth of each digit is held out, the same in every job",
        options=(Option("width", 256, "Units of a hidden layer", 8, 8192),),
    ),
    WorkloadEntry(
        name="digits-cnn",
        dataset="digits",
        meaning="A convolutional network on 1,797 handwritten digits",
        builder="hypergpu.workloads.networks.models:cnn",
        preprocessing="grey values of 0 to 16 are divided by 16",
        split="a fifth of each digit is held out, the same in every job",
        options=(_CHANNELS,),
    ),
)

_TEXT = (
    WorkloadEntry(
        name="text-gpt",
        version=2,  # runs are drawn to be held out
        dataset="text",
        metric="perplexity",
        meaning="A byte-level GPT on your folder of text, or on Python's own source",
        builder="hypergpu.workloads.networks.models:gpt",
        preprocessing="text is bytes of UTF-8, cut into blocks of block_length",
        split="of each ten runs of 16 KiB one is held out, drawn",
        takes_data="optional",
        takes_node_data=True,
        options=(
            Option("width", 128, "Size of an embedding", 8, 8192),
            Option("layers", 4, "Transformer layers", 1, 128),
            Option("heads", 4, "Attention heads; divides width", 1, 128, divides="width"),
            Option("block_length", 128, "Bytes seen at once", 8, 8192),
            Option(
                "corpus_bytes", 4 << 20, "Where the text is cut; 0 takes everything", 0, 1 << 40
            ),
        ),
    ),
)

_IMAGES = (
    WorkloadEntry(
        name="mnist-cnn",
        dataset="mnist",
        meaning="A convolutional network on MNIST, downloaded on first use, or your files of it",
        takes_data="optional",
        builder="hypergpu.workloads.networks.images:mnist_cnn",
        preprocessing=_GREY,
        split="the test files of the data set are held out",
        options=(_CHANNELS,),
    ),
    WorkloadEntry(
        name="cifar10-resnet18",
        dataset="cifar10",
        meaning="ResNet-18 on CIFAR-10, downloaded on first use, or your files of it",
        takes_data="optional",
        builder="hypergpu.workloads.networks.images:cifar10_resnet18",
        preprocessing=_GREY,
        split="the test files of the data set are held out",
        options=(_AUGMENT,),
    ),
    WorkloadEntry(
        name="cifar10-vgg11",
        dataset="cifar10",
        meaning="VGG-11 with batch norm on CIFAR-10, downloaded on first use, or your files of it",
        takes_data="optional",
        builder="hypergpu.workloads.networks.images:cifar10_vgg11",
        preprocessing=_GREY,
        split="the test files of the data set are held out",
        options=(_AUGMENT,),
    ),
    WorkloadEntry(
        name="imagefolder-resnet18",
        version=2,  # grey of 16 bits, orientation and transparency
        dataset="imagefolder",
        meaning="ResNet-18 on your folder of images, one sub-folder a class",
        builder="hypergpu.workloads.networks.images:folder_resnet18",
        preprocessing=f"the largest middle square, resized to image_size as RGB; {_GREY}",
        split="val/ or test/ where there is one beside train/, else a tenth of each class",
        takes_data="required",
        takes_node_data=True,
        options=(_CLASSES, _IMAGE_SIZE, _AUGMENT),
    ),
    WorkloadEntry(
        name="imagefolder-vgg11",
        version=2,  # grey of 16 bits, orientation and transparency
        dataset="imagefolder",
        meaning="VGG-11 on your folder of images, one sub-folder a class",
        builder="hypergpu.workloads.networks.images:folder_vgg11",
        preprocessing=f"the largest middle square, resized to image_size as RGB; {_GREY}",
        split="val/ or test/ where there is one beside train/, else a tenth of each class",
        takes_data="required",
        takes_node_data=True,
        options=(_CLASSES, _IMAGE_SIZE, _AUGMENT),
    ),
)

_NULL = (
    WorkloadEntry(
        name="null",
        kind="null",
        dataset="null",
        metric="score",
        meaning="Trains nothing: measures everything around training",
        builder="hypergpu.workloads.null:null",
        options=(
            Option(
                "parameters", 1_000_000, "float32 parameters of the pretended model", 1, 1 << 36
            ),
        ),
    ),
)

_PROGRAM = (
    WorkloadEntry(
        name="program",
        version=4,  # of the container, so that nodes of an older one are named
        oldest_version=2,
        dataset="program",
        metric="loss",
        meaning="A model of your own, by hypergpu.train(...) in Python",
        builder="hypergpu.workloads.networks.program:program",
        preprocessing="none: samples are as they were given to hypergpu.train",
        split="the samples given as held_out, else a tenth of each class, drawn",
        takes_data="required",
        takes_node_data=True,
        exported_files=("program/program.json", "program/tensors.safetensors"),
        options=(
            Option(
                "label",
                "",
                "Field with a sample's class, for skewed shards; empty: the only whole number",
            ),
        ),
    ),
)

_ADAPTER = (
    Option(
        "mode", "b", "b: A is drawn from adapter_seed and frozen; full: both", choices=("b", "full")
    ),
    Option("rank", 8, "Rank of the adapter", 1, 1024),
    Option("alpha", 16, "The adapter counts alpha / rank", 1, 65_536),
    Option("targets", "all-linear", "Modules with an adapter: all-linear, or names with commas"),
    Option("adapter_seed", 0, "What A is drawn from", 0, 2**53),
    Option(
        "base_dtype",
        "float32",
        "What the frozen base is held as; 4bit: NF4, by bitsandbytes",
        choices=("float32", "bfloat16", "4bit"),
    ),
    Option("base_digest", "", "Any other base is refused; empty: the one in the data"),
)
_HF_MODULES = ("peft", "tokenizers", "transformers")
_SEQUENCE = Option("sequence_length", 512, "Most tokens of a sample", 8, 1 << 20)

_ADAPTERS = (
    WorkloadEntry(
        name="hf-causal-lm",
        version=2,  # rows are drawn to be held out, and packed where that is right
        dataset="text",
        metric="perplexity",
        meaning="A LoRA adapter of a causal language model, on your text or chats",
        builder="hypergpu.workloads.finetuning.causal:causal_lm",
        preprocessing="the base's tokenizer and chat template; rows are cut at sequence_length",
        split=_ROWS_SPLIT,
        takes_data="required",
        takes_node_data=True,
        needs=_HF_MODULES,
        install="hypergpu[hf]",
        can_checkpoint=True,
        options=(
            *_ADAPTER,
            _SEQUENCE,
            Option("packing", True, "Several whole rows share a sample, each blind to the others"),
            Option(
                "loss_on",
                "completion",
                "completion: answers alone count, where rows have them; all: every token",
                choices=("completion", "all"),
            ),
        ),
    ),
)

_CLASSIFIERS = (
    WorkloadEntry(
        name="hf-text-classifier",
        version=2,  # rows are drawn to be held out, labels are names first
        dataset="text",
        meaning="A LoRA adapter and a head that judge your texts",
        builder="hypergpu.workloads.finetuning.classifiers:text_classifier",
        preprocessing="the base's tokenizer; texts are cut at sequence_length",
        split=_ROWS_SPLIT,
        takes_data="required",
        takes_node_data=True,
        needs=_HF_MODULES,
        install="hypergpu[hf]",
        can_checkpoint=True,
        options=(
            *_ADAPTER,
            Option("labels", "negative,positive", "The classes' names, with commas"),
            Option("sequence_length", 256, "Tokens after which a text is cut", 8, 1 << 20),
        ),
    ),
    WorkloadEntry(
        name="hf-image-classifier",
        version=2,  # the base's own size, channels and scale
        dataset="imagefolder",
        meaning="A LoRA adapter and a head that judge your images, one sub-folder a class",
        builder="hypergpu.workloads.finetuning.classifiers:image_classifier",
        preprocessing="resized to the base's size, with its mean and deviation",
        split="images/val or images/test beside images/train, else a tenth of each class, drawn",
        takes_data="required",
        takes_node_data=True,
        needs=(*_HF_MODULES, "torchvision"),
        install="hypergpu[hf]",
        can_checkpoint=True,
        options=(
            *_ADAPTER,
            Option("labels", "cat,dog", "The sub-folders' names, with commas"),
        ),
    ),
)

BUILT_IN: tuple[WorkloadEntry, ...] = (
    _DIGITS + _TEXT + _IMAGES + _ADAPTERS + _CLASSIFIERS + _PROGRAM + _NULL
)
