"""The workloads that come with HyperGPU."""

from hypergpu.workloads.entry import Option, WorkloadEntry

_CHANNELS = Option("channels", 32, "Channels of the first convolution; a multiple of 4", 4, 512)
_AUGMENT = Option("augment", True, "Shift and mirror training images")
_CLASSES = Option("classes", 10, "Sub-folders there are", 2, 100_000)
_IMAGE_SIZE = Option("image_size", 64, "Side in pixels that images are resized to", 16, 512)

_DIGITS = (
    WorkloadEntry(
        name="digits-softmax",
        kind="numpy",
        dataset="digits",
        meaning="Softmax regression on 1,797 handwritten digits; needs no torch",
        builder="hypergpu.workloads.digits.softmax:build",
    ),
    WorkloadEntry(
        name="digits-mlp",
        dataset="digits",
        meaning="A perceptron with two hidden layers on 1,797 handwritten digits",
        builder="hypergpu.workloads.networks.digits:mlp",
        options=(Option("width", 256, "Units of a hidden layer", 8, 8192),),
    ),
    WorkloadEntry(
        name="digits-cnn",
        dataset="digits",
        meaning="A convolutional network on 1,797 handwritten digits",
        builder="hypergpu.workloads.networks.digits:cnn",
        options=(_CHANNELS,),
    ),
)

_TEXT = (
    WorkloadEntry(
        name="text-gpt",
        dataset="text",
        metric="perplexity",
        meaning="A byte-level GPT on your folder of text, or on Python's own source",
        builder="hypergpu.workloads.networks.gpt:gpt",
        takes_data="optional",
        options=(
            Option("width", 128, "Size of an embedding", 8, 8192),
            Option("layers", 4, "Transformer layers", 1, 128),
            Option("heads", 4, "Attention heads; divides width", 1, 128),
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
        meaning="A convolutional network on MNIST, downloaded on first use",
        builder="hypergpu.workloads.networks.images:mnist_cnn",
        options=(_CHANNELS,),
    ),
    WorkloadEntry(
        name="cifar10-resnet18",
        dataset="cifar10",
        meaning="ResNet-18 on CIFAR-10, downloaded on first use",
        builder="hypergpu.workloads.networks.images:cifar10_resnet18",
        options=(_AUGMENT,),
    ),
    WorkloadEntry(
        name="cifar10-vgg11",
        dataset="cifar10",
        meaning="VGG-11 with batch normalisation on CIFAR-10, downloaded on first use",
        builder="hypergpu.workloads.networks.images:cifar10_vgg11",
        options=(_AUGMENT,),
    ),
    WorkloadEntry(
        name="imagefolder-resnet18",
        dataset="imagefolder",
        meaning="ResNet-18 on your folder of images, one sub-folder a class",
        builder="hypergpu.workloads.networks.images:folder_resnet18",
        takes_data="required",
        options=(_CLASSES, _IMAGE_SIZE, _AUGMENT),
    ),
    WorkloadEntry(
        name="imagefolder-vgg11",
        dataset="imagefolder",
        meaning="VGG-11 on your folder of images, one sub-folder a class",
        builder="hypergpu.workloads.networks.images:folder_vgg11",
        takes_data="required",
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
        builder="hypergpu.workloads.null:build",
        options=(
            Option(
                "parameters", 1_000_000, "float32 parameters of the pretended model", 1, 1 << 36
            ),
        ),
    ),
)

BUILT_IN: tuple[WorkloadEntry, ...] = _DIGITS + _TEXT + _IMAGES + _NULL
