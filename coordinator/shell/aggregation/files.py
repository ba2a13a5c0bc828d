"""The files of one fold: its inputs, the meaning of a damaged one, and its outputs."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from coordinator.shell.aggregation.request import (
    BaseDamagedError,
    FoldRequest,
    FoldResult,
    OmittedUpdate,
    Reuse,
)
from coordinator.shell.aggregation.streams import InputError, InputFile, OutputFile
from hypergpu.tensors.codec import update_bytes
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
        self.samples = [update.samples for update in updates]
        self.schemes = [update.scheme for update in updates]

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
        for update, scheme in zip(self.updates, self.schemes, strict=True):
            sizes[update] = (update_bytes(layout, scheme),)
        self._check(lambda file: file.check_size(*sizes[file]))

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
        omitted = tuple(
            OmittedUpdate(index, reasons[update])
            for index, update in zip(self._kept, self.updates, strict=True)
            if update in reasons
        )
        if omitted:
            raise DamagedUpdatesError(omitted)

    def _check(self, check: Callable[[InputFile], None]) -> None:
        errors: list[InputError] = []
        for file in (self.base, *([self.state] if self.state else ()), *self.updates):
            try:
                check(file)
            except InputError as error:
                errors.append(error)
        self.raise_damaged(errors)


class FoldOutputs:
    """The next model and, where the settings call for them, its outer state and its delta.

    Nodes that fetch whole models hold the exact parameters, so that neither a delta nor a second
    copy of the parameters is of use; and no momentum is kept where none is applied.
    """

    def __init__(self, request: FoldRequest, on_failure: ExitStack, reuse: Reuse) -> None:
        self.has_parameters = request.down != "fp32"
        self.has_momentum = request.outer.momentum != 0
        self.momentum_start = 4 * request.layout.parameters_count if self.has_parameters else 0

        def create(size_bytes: int) -> OutputFile:
            path = request.output_dir / f"fold-{secrets.token_hex(8)}.tmp"
            reuse(path, size_bytes)
            return OutputFile(path, on_failure)

        layout = request.layout
        vectors = self.has_parameters + self.has_momentum
        self.model = create(layout.model_bytes)
        self.state = create(4 * layout.parameters_count * vectors) if vectors else None
        delta_bytes = update_bytes(layout, request.down)
        self.delta = create(delta_bytes) if self.has_parameters else None

    def close(self) -> FoldResult:
        """Close and name all of them. Nothing may be queued any more."""
        return FoldResult(
            model=self.model.close(),
            outer_state=self.state.close() if self.state else None,
            delta=self.delta.close() if self.delta else None,
        )
