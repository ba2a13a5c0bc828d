"""The workloads that come with HyperGPU."""

from hypergpu.workloads.entry import Option, WorkloadEntry

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
        optimizer="muon",
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
        optimizer="muon",
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
    WorkloadEntry(
        name="text-mixture",
        dataset="text",
        metric="perplexity",
        meaning="A byte-level mixture of experts on text, of which a node may hold some experts",
        builder="hypergpu.workloads.networks.mixture:byte_mixture",
        preprocessing="text is bytes of UTF-8, cut into blocks of block_length",
        split="of each ten runs of 16 KiB one is held out, drawn",
        takes_data="optional",
        options=(
            Option("experts", 8, "Experts of a layer", 1, 256),
            Option(
                "held_experts",
                0,
                "Experts that a node holds; 0: all",
                0,
                256,
                at_most=("experts",),
            ),
            Option(
                "experts_per_token",
                2,
                "Experts that a token is sent to",
                1,
                64,
                at_most=("held_experts", "experts"),
            ),
            Option("width", 64, "Size of an embedding", 8, 8192),
            Option("hidden", 256, "Units of an expert's hidden layer", 8, 65_536),
            Option("layers", 2, "Transformer layers", 1, 128),
            Option("heads", 4, "Attention heads; divides width", 1, 128, divides="width"),
            Option("block_length", 64, "Bytes seen at once", 8, 8192),
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
