"""`python -m hypergpu.workloads.networks.fetch DATASET` downloads a public dataset.

For daemons whose workers have no network: it runs beside the worker, and runs no workload's code.
"""

import sys
from collections.abc import Callable

from hypergpu.workloads.datasets import Dataset, DatasetError
from hypergpu.workloads.networks.image_data import read_cifar10, read_mnist

_READERS: dict[str, Callable[[str], Dataset]] = {"cifar10": read_cifar10, "mnist": read_mnist}


def main() -> int:
    """Download the dataset that the first argument names; gives the process's exit status."""
    try:
        _READERS[sys.argv[1]]("")
    except DatasetError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
