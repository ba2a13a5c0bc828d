"""The folder of a job's own data, which commands name to the evaluator."""

import asyncio

from coordinator.shell.store.datasets import lay_out_dataset
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef


async def data_dir(storage: Storage, manifest: BlobRef | None) -> str:
    """The folder of the job's own data; empty when it has none.

    Raises:
        HyperGPUError: a file is missing or damaged.
    """
    if manifest is None:
        return ""
    return str(
        await asyncio.to_thread(lay_out_dataset, storage.blobs, manifest, storage.datasets_dir)
    )
