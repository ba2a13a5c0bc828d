"""The files that a fold reads and writes. Knows no arithmetic."""

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from coordinator.shell.aggregation.digested_files import Buffer, InputError, InputFile, OutputFile
from coordinator.shell.aggregation.fold_request import (
    BaseDamagedError,
    FoldRequest,
    FoldResult,
    OmittedUpdate,
)
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import Octets
from hypergpu.units import are, several


class DamagedUpdatesError(Exception):
    """Some updates cannot be part of the sum."""

    def __init__(self, omitted: tuple[OmittedUpdate, ...]) -> None:
        super().__init__(f"{several(len(omitted), 'update')} {are(len(omitted))} damaged")
        self.omitted = omitted


class FoldInputs:
    """Base model, outer state and the updates that are kept, in slot order."""

    def __init__(self, request: FoldRequest, kept: Sequence[int]) -> None:
        self._request = request
        self._kept = kept
        self.base = InputFile(request.base_model.path, request.base_model.digest)
        state = request.outer_state
        self.state = InputFile(state.path, state.digest) if state else None
        updates = [request.updates[index] for index in kept]
        self.updates = [InputFile(update.path, update.digest) for update in updates]
        self.weights = [update.weight for update in updates]
        self.clips = [update.clip for update in updates]
        self.codecs = [update.codec for update in updates]

    @property
    def has_parameters(self) -> bool:
        """Whether the outer state holds the exact parameters: nodes hold something else."""
        return self.state is not None and self._request.down != "fp32"

    @property
    def has_momentum(self) -> bool:
        """Whether the outer state holds momentum, which it does not after a step without any."""
        return self.state is not None and self.state.size_bytes > self.momentum_start

    @property
    def momentum_start(self) -> int:
        """Where momentum begins in the outer state."""
        return 4 * self._request.layout.parameters_count if self.has_parameters else 0

    def check_sizes(self) -> None:
        """Look at every size before anything is read.

        Raises:
            BaseDamagedError: The base or the outer state is missing or has another size.
            DamagedUpdatesError: Some updates do.
        """
        layout = self._request.layout
        vector_bytes = 4 * layout.parameters_count
        sizes: dict[InputFile, tuple[int, ...]] = {self.base: (layout.model_bytes,)}
        if self.state is not None:
            both = 2 * vector_bytes if self.has_parameters else vector_bytes
            sizes[self.state] = (vector_bytes, both)
        for update, codec in zip(self.updates, self.codecs, strict=True):
            sizes[update] = (update_bytes(layout, codec),)
        self._check(lambda file: file.check_size(*sizes[file]))

    def skip_digests(self) -> None:
        """Digest nothing of what is read from now on."""
        for file in (self.base, *([self.state] if self.state else ()), *self.updates):
            file.is_digested = False

    def check_digests(self) -> None:
        """Compare every digest once everything is read; errors as `check_sizes`."""
        self._check(InputFile.check_digest)

    def raise_damaged(self, errors: Sequence[InputError]) -> None:
        """Raise the meaning of failed reads; a damaged base comes before damaged updates."""
        reasons = {error.file: error.reason for error in errors}
        for file, blob in (
            (self.base, self._request.base_model),
            (self.state, self._request.outer_state),
        ):
            if file in reasons and blob is not None:
                raise BaseDamagedError(blob, reasons[file])
        omitted_updates = tuple(
            OmittedUpdate(index, reasons[update])
            for index, update in zip(self._kept, self.updates, strict=True)
            if update in reasons
        )
        if omitted_updates:
            raise DamagedUpdatesError(omitted_updates)

    def _check(self, check: Callable[[InputFile], None]) -> None:
        errors: list[InputError] = []
        for file in (self.base, *([self.state] if self.state else ()), *self.updates):
            try:
                check(file)
            except InputError as error:
                errors.append(error)
        self.raise_damaged(errors)


class SharedOutput(OutputFile):
    """Part of a file that others write parts of, too. It is there, and nobody digests it here."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ExitStack())

    def write(self, buffer: Buffer, offset: int, octets: Octets) -> None:
        """Queue a write of a buffer's bytes at any offset."""
        buffer.queue(lambda: self._store(octets, offset, None))

    def release(self) -> None:
        """Close the file. The ring must be drained."""
        os.close(self._descriptor)


def output_sizes(request: FoldRequest) -> dict[str, int]:
    """Bytes of each file that a fold writes, by its name in `FoldResult`.

    Nodes that fetch whole models hold the exact parameters, so that neither a delta nor a second
    copy of the parameters is of use; and no momentum is kept where none is applied.
    """
    layout, has_parameters = request.layout, request.down != "fp32"
    vectors = has_parameters + (request.outer.momentum != 0)
    sizes: dict[str, int] = {"model": layout.model_bytes}
    if vectors:
        sizes["outer_state"] = 4 * layout.parameters_count * vectors
    if has_parameters:
        sizes["delta"] = update_bytes(layout, request.down)
    return sizes


def work_path(folder: Path) -> Path:
    """A path that nobody has."""
    return folder / f"fold-{secrets.token_hex(8)}.tmp"


class FoldOutputs:
    """The next model and, where the settings call for them, its outer state and its delta."""

    def __init__(self, request: FoldRequest, create: Callable[[str, int], OutputFile]) -> None:
        """Open them.

        Args:
            request: What is folded.
            create: Opens the file of a name in `output_sizes`, of so many bytes.
        """
        self.has_momentum = request.outer.momentum != 0
        has_parameters = request.down != "fp32"
        self.momentum_start = 4 * request.layout.parameters_count if has_parameters else 0
        sizes = output_sizes(request)
        self.model = create("model", sizes["model"])
        self.state = create("outer_state", sizes["outer_state"]) if "outer_state" in sizes else None
        self.delta = create("delta", sizes["delta"]) if "delta" in sizes else None

    def close(self) -> FoldResult:
        """Close and name all of them. Nothing may be queued any more."""
        return FoldResult(
            model=self.model.close(),
            outer_state=self.state.close() if self.state else None,
            delta=self.delta.close() if self.delta else None,
        )
