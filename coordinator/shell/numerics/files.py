"""The files of one fold: what it reads, who is to blame when one is damaged, and what it writes."""

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from coordinator.shell.numerics.request import (
    BaseDamagedError,
    FoldRequest,
    FoldResult,
    RefusedUpdate,
    Reuse,
)
from coordinator.shell.numerics.streams import InputError, InputFile, OutputFile
from hypergpu.tensors.codec import update_bytes
from hypergpu.units import are, several


class DamagedUpdatesError(Exception):
    """Some updates cannot be part of the sum."""

    def __init__(self, refused: tuple[RefusedUpdate, ...]) -> None:
        super().__init__(f"{several(len(refused), 'update')} {are(len(refused))} damaged")
        self.refused = refused


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

    def refuse_other_sizes(self) -> None:
        """Look at every size before anything is read.

        Raises:
            BaseDamagedError: The base is missing or has another size.
            DamagedUpdatesError: Some updates do.
        """
        layout = self._request.layout
        vector_bytes = 4 * layout.parameters_count
        self._judge_base(lambda: self.base.refuse_other_size(layout.model_bytes))
        if self.state is not None:
            state = self.state
            both = 2 * vector_bytes if self.has_parameters else vector_bytes
            self._judge_base(lambda: state.refuse_other_size(vector_bytes, both))
        sizes_bytes = dict(
            zip(self.updates, (update_bytes(layout, each) for each in self.schemes), strict=True)
        )
        self._judge_updates(lambda update: update.refuse_other_size(sizes_bytes[update]))

    def refuse_other_digests(self) -> None:
        """Compare every digest once everything is read; errors as `refuse_other_sizes`."""
        self._judge_base(self.base.refuse_other_digest)
        if self.state is not None:
            self._judge_base(self.state.refuse_other_digest)
        self._judge_updates(InputFile.refuse_other_digest)

    def blame(self, error: InputError) -> BaseDamagedError | DamagedUpdatesError:
        """Say what a failed read means."""
        if error.file is self.base:
            return BaseDamagedError(self._request.base_model, error.reason)
        if error.file is self.state and self._request.outer_state is not None:
            return BaseDamagedError(self._request.outer_state, error.reason)
        index = self._kept[self.updates.index(error.file)]
        return DamagedUpdatesError((RefusedUpdate(index, error.reason),))

    def _judge_base(self, judge: Callable[[], None]) -> None:
        try:
            judge()
        except InputError as error:
            raise self.blame(error) from error

    def _judge_updates(self, judge: Callable[[InputFile], None]) -> None:
        refused: list[RefusedUpdate] = []
        for index, update in zip(self._kept, self.updates, strict=True):
            try:
                judge(update)
            except InputError as error:
                refused.append(RefusedUpdate(index, error.reason))
        if refused:
            raise DamagedUpdatesError(tuple(refused))


class FoldOutputs:
    """The next model and, where the settings call for them, its outer state and its delta.

    Nodes that fetch whole models hold the exact parameters, so that neither a delta nor a second
    copy of the parameters is of use; and no momentum is kept where none is applied.
    """

    def __init__(self, request: FoldRequest, on_failure: ExitStack, reuse: Reuse) -> None:
        self.has_parameters = request.down != "fp32"
        self.has_momentum = request.step.momentum != 0
        self.momentum_start = 4 * request.layout.parameters_count if self.has_parameters else 0

        def created(size_bytes: int) -> OutputFile:
            path = request.output_dir / f"fold-{secrets.token_hex(8)}.tmp"
            reuse(path, size_bytes)
            return OutputFile(path, on_failure)

        layout = request.layout
        vectors = self.has_parameters + self.has_momentum
        self.model = created(layout.model_bytes)
        self.state = created(4 * layout.parameters_count * vectors) if vectors else None
        delta_bytes = update_bytes(layout, request.down)
        self.delta = created(delta_bytes) if self.has_parameters else None

    def finished(self, refused: tuple[RefusedUpdate, ...], agreement: float | None) -> FoldResult:
        """Close and name all of them. Nothing may be queued any more."""
        return FoldResult(
            model=self.model.finished(),
            outer_state=self.state.finished() if self.state else None,
            delta=self.delta.finished() if self.delta else None,
            refused=refused,
            agreement=agreement,
        )
