"""Bundles of farm jobs laid out as the daemon does it, for performers that run in the test."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_node.shell.worker.performers import PERFORMERS
from gpu_node.shell.worker.protocol import DoWork, ShardProgress
from gpu_node.shell.worker.trainer import ShardCallbacks
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.farm.array_items import array_items
from hypergpu.farm.base_files import BASE_INDEX
from hypergpu.farm.bundle_results import ItemResult, read_json_results, read_vector_results
from hypergpu.farm.bundles import Bundle, BundleChunk, BundleResult
from hypergpu.farm.item_chunks import ItemEncoding, json_lines
from hypergpu.farm.map_request import work_kind
from hypergpu.ids import JobId
from hypergpu.packed_work import pack_work, unpack_work
from hypergpu.units import Bytes
from hypergpu.user.farm.base_parts import base_parts


class BundleFolder:
    """A job's items and files, and performers over them in this process."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = work_kind(kind)
        self.chunks: tuple[BundleChunk, ...] = ()
        self.files: dict[str, BlobRef] = {}
        self.encoding = ItemEncoding.JSONL
        self.progress: list[ShardProgress] = []
        self.claims: BlobRef | None = None
        self.raise_if_aborted = lambda: None
        self._inputs, self._outputs = folder / "inputs", folder / "outputs"
        self._inputs.mkdir(parents=True)
        self._outputs.mkdir()

    def add_file(self, name: str, content: bytes) -> None:
        self.files[name] = self._write(content)

    def add_base(self, folder: Path) -> None:
        parts = base_parts(folder)
        self.add_file(BASE_INDEX, parts.index_content)
        for name, path in parts.large_files.items():
            self.add_file(name, path.read_bytes())

    def add_claims(self, content: bytes) -> None:
        """Have claims judged from now on."""
        self.claims = self._write(content)

    def add_items(self, items: Sequence[Any]) -> None:
        """Add a chunk of JSON lines."""
        self.add_lines(json_lines(items), len(items))

    def add_lines(self, content: bytes, items: int) -> None:
        """Add a chunk as it is."""
        blob = self._write(content)
        self.chunks = (*self.chunks, BundleChunk(blob, self.items, items))

    def add_arrays(self, fields: Mapping[str, NDArray[Any]]) -> None:
        """Add a chunk of arrays."""
        self.encoding = ItemEncoding.ARROW
        self.add_lines(array_items(fields), len(next(iter(fields.values()))))

    @property
    def items(self) -> int:
        return sum(chunk.items for chunk in self.chunks)

    def perform(
        self, start: int = 0, items: int = 0, seed: int = 0, **parameters: Any
    ) -> tuple[BundleResult, bytes]:
        """Do some of the items; all by default."""
        items = items or self.items - start
        chunks = [
            chunk
            for chunk in self.chunks
            if chunk.start < start + items and chunk.start + chunk.items > start
        ]
        bundle = Bundle(
            start=start,
            items=items,
            encoding=self.encoding,
            chunks=tuple(chunks),
            files=self.files,
            claims=self.claims,
            parameters=parameters,
            seed=seed,
        )
        lease = Lease(JobId("job-1"), 1, 1)
        work = pack_work(self.kind, bundle)
        request = DoWork(lease, work, str(self._inputs), str(self._outputs))
        callbacks = ShardCallbacks(self.raise_if_aborted, self.progress.append, lambda _line: None)
        output = PERFORMERS.perform(request, callbacks)
        result = unpack_work(output.result, self.kind, BundleResult)
        assert output.blob == result.blob
        content = request.output_path(result.blob.digest).read_bytes()
        assert digest_of(content) == result.blob.digest
        assert result.items + result.failures == items
        return result, content

    def values(self, **choice: Any) -> list[ItemResult]:
        """Results in JSON lines."""
        result, content = self.perform(**choice)
        return read_json_results(content, result.items + result.failures)

    def vectors(self, **choice: Any) -> NDArray[np.float32]:
        """Results in arrays."""
        result, content = self.perform(**choice)
        return read_vector_results(content, result.items + result.failures).values

    def _write(self, content: bytes) -> BlobRef:
        blob = BlobRef(digest_of(content), Bytes(len(content)))
        (self._inputs / blob.digest).write_bytes(content)
        return blob


def counting_texts(count: int) -> list[str]:
    """Texts of unequal length, in words that the tiny tokenizers know."""
    return [
        " ".join(str(number + 7 * step) for step in range(number % 9 + 1))
        for number in range(count)
    ]
