"""The folder beside an output in which an unfinished run keeps what it needs to go on.

It holds the run's state, the items as they are sent, and pieces: the results that came, each a file
named by its first position, so that their order is that of the input.
"""

import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.durable import PRIVATE, sync_folder, write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest

SUFFIXES = (".jsonl", ".parquet")
_STATE_BYTES_MOST = 64 << 10
_DIGITS = 13
"""Digits of a position in a piece's name: 2**40 items."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What an unfinished run must not forget."""

    request_id: str
    """By which the job is created once."""
    request_digest: Digest
    """Digest of the request, and so of items, files and settings."""
    job: str = ""
    """Id of the job; empty: it may not be created yet."""


class PieceName(NamedTuple):
    """Positions that a piece holds."""

    start: int
    items: int

    @property
    def stem(self) -> str:
        """Name of its file without an ending."""
        return f"{self.start:0{_DIGITS}}-{self.items}"

    @classmethod
    def of(cls, path: Path) -> "PieceName":
        """The positions that a file's name states."""
        start, _, items = path.stem.partition("-")
        return cls(int(start), int(items))


class OutputFolder:
    """The folder of one output.

    Args:
        out: Path of the output.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it has no ending of an output.
    """

    def __init__(self, out: Path) -> None:
        if out.suffix not in SUFFIXES:
            detail = f"the output {out} ends neither in {' nor in '.join(SUFFIXES)}"
            raise HyperGPUError(
                Reason.ARGUMENT_INVALID, detail, fix=f"name it {out.stem or 'output'}.parquet"
            )
        self.out = out
        self.path = out.with_name(f"{out.name}.part")
        self.input = self.path / "input"
        self.pieces = self.path / "pieces"
        self.pictures = self.path / "pictures"
        self.ids = self.path / "ids.jsonl"
        self.reasons = self.path / "reasons.json"
        self._state = self.path / "state.json"
        self._lock_descriptor: int | None = None

    @property
    def errors(self) -> Path:
        """The file of items that have a reason in place of a value."""
        return self.out.with_name(f"{self.out.stem}.errors.jsonl")

    @property
    def pictures_out(self) -> Path:
        """The folder of pictures beside the output, of kinds that make some."""
        return self.out.with_name(f"{self.out.stem}.pictures")

    def begin(self, *, may_resume: bool, may_overwrite: bool) -> RunState | None:
        """Take the folder for this process; gives the state of the run that is to go on.

        Raises:
            HyperGPUError: FILE_PRESENT, something is there that may not be replaced;
                FILE_UNUSABLE, another program has the folder, or it cannot be made.
        """
        if not may_overwrite:
            self._check_free(may_resume=may_resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock()
            state = self._read_state() if may_resume else None
            if state is None:
                self._clear()
            for folder in (self.input, self.pieces):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            detail = f"{error.filename or self.path}: {error.strerror}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
        return state

    def _check_free(self, *, may_resume: bool) -> None:
        if self.out.exists() and not (may_resume and self.path.exists()):
            detail = f"{self.out} is there already" + (", finished" if may_resume else "")
            fix = "choose another --out, or replace it: --force"
            raise HyperGPUError(Reason.FILE_PRESENT, detail, fix=fix)
        if self.pictures_out.exists() and not self.path.exists():
            detail = f"{self.pictures_out} is there already"
            fix = "choose another --out, or replace it: --force"
            raise HyperGPUError(Reason.FILE_PRESENT, detail, fix=fix)
        if self._state.exists() and not may_resume:
            detail = f"{self.path} holds an unfinished run"
            fix = "go on with it: --resume, or begin anew: --force"
            raise HyperGPUError(Reason.FILE_PRESENT, detail, fix=fix)

    def _lock(self) -> None:
        """Keep other programs away, until `close` or the end of this one."""
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            detail = f"another program works on {self.out} at this moment"
            raise HyperGPUError(
                Reason.FILE_UNUSABLE, detail, fix="let it finish, or stop it"
            ) from None
        self._lock_descriptor = descriptor

    def close(self) -> None:
        """Let other programs have the folder."""
        if self._lock_descriptor is not None:
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def _read_state(self) -> RunState | None:
        if not self._state.exists():
            return None
        content = self._state.read_bytes()[: _STATE_BYTES_MOST + 1]
        try:
            return msgspec.json.decode(content, type=RunState)
        except msgspec.MsgspecError as error:
            detail = f"{self._state} is damaged: {error}"
            raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix="begin anew: --force") from error

    def _clear(self) -> None:
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def write_state(self, state: RunState) -> None:
        """Store the run's state, durably."""
        write_durably(self._state, msgspec.json.encode(state), mode=PRIVATE)

    def write_ids(self, ids: Sequence[str | int]) -> None:
        """Store the items' ids, in order."""
        content = b"".join(msgspec.json.encode(each) + b"\n" for each in ids)
        write_durably(self.ids, content, mode=PRIVATE)

    def read_ids(self) -> list[str | int]:
        """The items' ids in order; none where they are their positions."""
        if not self.ids.exists():
            return []
        with self.ids.open("rb") as file:
            return [msgspec.json.decode(line, type=str | int) for line in file]

    def write_reasons(self, reasons: dict[int, str]) -> None:
        """Store why rows could not become items, by position."""
        write_durably(self.reasons, msgspec.json.encode(reasons), mode=PRIVATE)

    def read_reasons(self) -> dict[int, str]:
        """Why rows could not become items, by position."""
        if not self.reasons.exists():
            return {}
        return msgspec.json.decode(self.reasons.read_bytes(), type=dict[int, str])

    def piece_path(self, name: PieceName) -> Path:
        """File of a piece, in the format of the output."""
        return self.pieces / f"{name.stem}{self.out.suffix}"

    def piece_names(self) -> list[PieceName]:
        """All pieces that are there, in order."""
        paths = self.pieces.glob(f"[0-9]*{self.out.suffix}")
        return sorted(PieceName.of(path) for path in paths)

    def publish_pictures(self) -> None:
        """Move the pictures beside the output, in place of older ones; does nothing twice."""
        if self.pictures.is_dir():
            shutil.rmtree(self.pictures_out, ignore_errors=True)
            self.pictures.rename(self.pictures_out)

    def drop_input(self) -> None:
        """Remove the items as they were sent: the job has them."""
        shutil.rmtree(self.input, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder, once the output is there."""
        shutil.rmtree(self.path)
        self.close()
        sync_folder(self.out.parent)
