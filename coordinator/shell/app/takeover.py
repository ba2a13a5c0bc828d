"""A coordinator as one of several on a database: it waits for its turn, and ends its turn."""

import os
import secrets
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import msgspec
import structlog
from msgspec.structs import replace
from sqlalchemy import inspect
from sqlalchemy.exc import DBAPIError, InternalError, OperationalError

from coordinator.config import Settings
from coordinator.core.hub.tenure import Claimant, Tenure
from coordinator.shell.app.ports import dialled_hosts, joined_address
from coordinator.shell.nodes.identity.authority import coordinator_key
from coordinator.shell.nodes.identity.shared_secrets import SharedSecrets
from coordinator.shell.store.blobs.store import BlobCopies, BlobStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.opening import BulkPlace, open_kept
from coordinator.shell.store.journal.coordinators import (
    CoordinatorRecord,
    OtherCoordinators,
    register,
)
from coordinator.shell.store.journal.engines import is_sqlite, journal_url, make_engine
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import (
    JournalError,
    JournalUnreadableError,
    TenureLostError,
)
from coordinator.shell.store.journal.schema import COORDINATORS
from coordinator.shell.store.journal.tenure import ALONE_MS, TenureClaim, boot_ms, refuse_to_wait
from hypergpu.crypto import IdentityKey
from hypergpu.durable import write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.keys import TERMINAL, passphrase_of_file
from hypergpu.units import Milliseconds

if TYPE_CHECKING:
    # It needs boto3, of the extra [s3].
    from coordinator.shell.store.bulk.kept_blobs import KeptBlobs

log = structlog.get_logger()

_NAME = "coordinator.name"
_LOOK_S = 0.25
"""How often a standby looks whether the tenure is free."""
_AGAIN_S = 1.0
_STANDARD_MOST = 2
"""Descriptors of input, output and errors, which outlive a process that begins anew."""
_NOTHING_ELSE = threading.Event()
"""Never set: until it drives, this process has nothing to do but look again, and signals end it."""


class StandingBy(msgspec.Struct, frozen=True):
    """The line on standard output that says whom this coordinator waits for."""

    standing_by: str
    """Address of the coordinator that drives."""


class _Waiting:
    """Says once who drives, and waits a little each time."""

    def __init__(self) -> None:
        self._number = -1

    def __call__(self, held: Tenure) -> None:
        if held.number != self._number:
            self._number = held.number
            log.info("standing by: another coordinator drives", active=held.address)
            sys.stdout.write(msgspec.json.encode(StandingBy(held.address)).decode() + "\n")
            sys.stdout.flush()
        _NOTHING_ELSE.wait(_LOOK_S)


class DatabaseWait:
    """How long the database did not answer, by a clock that also runs while the machine sleeps."""

    def __init__(self) -> None:
        self.last_ms = Milliseconds(0)
        """Length of the last time; 0: it always answered."""
        self._since_ms: Milliseconds | None = None

    def begin(self) -> None:
        """Note that it does not answer."""
        if self._since_ms is None:
            self._since_ms = boot_ms()

    def end(self) -> None:
        """Note that it answers."""
        if self._since_ms is not None:
            self.last_ms = Milliseconds(boot_ms() - self._since_ms)
            self._since_ms = None


class Turn(NamedTuple):
    """What a coordinator has once it drives."""

    journal: Journal
    key: IdentityKey
    others: OtherCoordinators = OtherCoordinators()
    shared: SharedSecrets | None = None
    """None: its secrets are its own."""
    kept: "KeptBlobs | None" = None
    """Where its blobs outlive this machine; None: nowhere."""

    def keep_secrets(self) -> None:
        """Store what this coordinator has made, before anybody hears of it."""
        if self.shared is not None:
            self.shared.keep(self.journal.database.writer)


def take_turn(settings: Settings) -> Turn:
    """Open the journal and the key. With ``takeover`` that lasts until nobody else drives. Blocks.

    Raises:
        JournalError: Another coordinator uses it, or it cannot be read.
        HyperGPUError: ``takeover`` lacks what it needs, or the secrets cannot be shared.
    """
    url = settings.database_url or str(settings.data_dir / "journal.sqlite")
    if not settings.takeover:
        journal = Journal(url, TenureClaim(_claimant(settings), refuse_to_wait))
        return Turn(journal, coordinator_key(settings.data_dir, settings.passphrase_file))
    _check(settings, url)
    assert settings.passphrase_file is not None  # noqa: S101 - it was checked
    shared_secrets = SharedSecrets(settings.data_dir, passphrase_of_file(settings.passphrase_file))
    preparation, record, database_wait = None, _record(settings), DatabaseWait()
    while True:
        try:
            if _restore_early(url, shared_secrets, record):
                preparation = _prepare(settings)
            database_wait.end()
            claimant = replace(_claimant(settings), waited_ms=database_wait.last_ms)
            journal = Journal(url, TenureClaim(claimant, _Waiting()))
        except (DBAPIError, JournalUnreadableError) as error:
            if not is_away(error):
                raise
            log.warning("the database is waited for", reason=str(error))
            database_wait.begin()
            _NOTHING_ELSE.wait(_AGAIN_S)
            continue
        with journal.database.writer() as connection:
            register(connection, record)
        _restore(journal, shared_secrets, settings.data_dir)
        key, blob_copies = preparation or _prepare(settings)
        others = OtherCoordinators(journal.database, record.name)
        others.refresh()
        return Turn(journal, key, others, shared_secrets, blob_copies)


def _prepare(settings: Settings) -> "tuple[IdentityKey, KeptBlobs]":
    """What takes a second or two, and needs the secrets."""
    key = coordinator_key(settings.data_dir, settings.passphrase_file)
    return key, open_kept(BulkPlace(settings.data_dir, settings.blobs, key.node_id))


def is_away(failure: BaseException) -> bool:
    """Whether the database did not answer, ended what was under way, or knows another coordinator
    that drives: a standby goes on after it.
    """
    if isinstance(failure, BaseExceptionGroup):
        return any(is_away(each) for each in failure.exceptions)
    if isinstance(failure, TenureLostError):
        return True
    is_of_journal = isinstance(failure, JournalError)
    cause = failure.__cause__ if is_of_journal else failure
    # PostgreSQL calls its end of a transaction that stood still an internal error.
    return isinstance(cause, OperationalError | InternalError)


def open_blobs(folder: Path, space: Space, copies: BlobCopies | None) -> BlobStore:
    """Open the blobs. An object store that does not answer is waited for. Blocks.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it refuses, which does not pass by itself.
    """
    while True:
        try:
            return BlobStore(folder, space, copies)
        except HyperGPUError as error:
            if error.reason is not Reason.STORE_UNREACHABLE:
                raise
            log.warning("the object store is waited for", reason=str(error))
            _NOTHING_ELSE.wait(_AGAIN_S)


def end_turn(settings: Settings, why: str) -> NoReturn:
    """End this process at once: it may write, sign and answer no more. Any thread may call.

    With ``takeover`` it begins anew in the same process, as a standby.
    """
    log.error("this coordinator drives no more", reason=why)
    sys.stderr.flush()
    if not settings.takeover:
        os._exit(Reason.NOT_READY.exit_code)
    # Sockets and pipes close, and so do the child processes behind them. Not sooner: threads of
    # gRPC still run, and what one does whose descriptors are gone may end the process.
    for each in Path("/dev/fd").iterdir():
        if (descriptor := int(each.name)) > _STANDARD_MOST:
            with suppress(OSError):
                os.set_inheritable(descriptor, False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - itself


def _claimant(settings: Settings) -> Claimant:
    host = dialled_hosts(settings)[0]
    address = joined_address(host, settings.port)
    length_ms = Milliseconds(settings.tenure_ms) if settings.takeover else ALONE_MS
    name = _name(settings.data_dir)
    return Claimant(name, address, length_ms, is_alone=not settings.takeover)


def _record(settings: Settings) -> CoordinatorRecord:
    own, host = _claimant(settings), dialled_hosts(settings)[0]
    return CoordinatorRecord(own.name, own.address, joined_address(host, settings.node_port))


def _name(folder: Path) -> str:
    """A name that no other folder has: whoever locked it is the only one of the name."""
    path = folder / _NAME
    try:
        return path.read_text("ascii")
    except FileNotFoundError:
        name = secrets.token_hex(16)
        write_durably(path, name.encode())
        return name


def _check(settings: Settings, url: str) -> None:
    lacks = [
        what
        for what, is_there in (
            ("a PostgreSQL (--database-url)", not is_sqlite(journal_url(url))),
            (
                "a file with the passphrase that all coordinators have (--passphrase-file)",
                settings.passphrase_file not in {None, TERMINAL},
            ),
            ("an object store (--blobs)", bool(settings.blobs)),
            ("ports that nodes know (--port, --node-port)", settings.port * settings.node_port),
        )
        if not is_there
    ]
    if lacks:
        detail = f"--takeover needs {', '.join(lacks)}: another machine has nothing of this one's"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="see docs/takeover.md")


def _restore_early(url: str, shared: SharedSecrets, record: CoordinatorRecord) -> bool:
    """Be known, and get the secrets, which takes time, while another coordinator still drives.

    Returns:
        Whether there are secrets.
    """
    engine = make_engine(journal_url(url))
    try:
        if inspect(engine).has_table(COORDINATORS.name):
            with engine.begin() as connection:
                register(connection, record)
            with engine.connect() as connection:
                shared.restore(connection)
    finally:
        engine.dispose()
    return shared.are_kept


def _restore(journal: Journal, shared: SharedSecrets, folder: Path) -> None:
    """Get them once nobody else can make any."""
    with journal.database.reader() as connection:
        shared.restore(connection)
    has_own = (folder / "identity").exists() and not journal.database.follows_another
    if not shared.are_kept and not has_own and (journal.jobs() or journal.tokens()):
        journal.close()
        raise JournalError(
            "the journal is of a coordinator that keeps its keys in its folder:"
            " start that one once with --takeover and the same --passphrase-file"
        )
