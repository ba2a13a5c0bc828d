"""The row in PostgreSQL that says which coordinator drives, and what keeps and checks it.

Every transaction that writes locks the row against a change of its number, and fails where the
number is not the writer's. Who takes a tenure waits for such transactions, and the server ends one
whose client has stopped in its middle.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog
from sqlalchemy import Engine, func, insert, literal_column, select, text, update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, OperationalError

from coordinator.core.hub.tenure import (
    NOBODY,
    Claimant,
    Tenure,
    given_up_ms,
    next_tenure,
    renewed_until_ms,
    takeover_text,
)
from coordinator.shell.store.journal.records import JournalLockedError, TenureLostError
from coordinator.shell.store.journal.schema import TENURE
from hypergpu.units import Milliseconds

log = structlog.get_logger()

ALONE_MS = Milliseconds(30_000)
"""Length of a tenure that nobody waits for: its holder has time."""
_RENEWALS = 6
"""Renewals in the time of a tenure."""
_LOOK_S = 0.1
"""How often its holder looks at its own clock."""
_IDLE_MS = 2_000
"""The server ends a transaction whose client says nothing for so long."""
_LOCK_MS = 1_000
_LOCK_TIMEOUT = "55P03"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_CLOCK_MS = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_NOW_MS = text(f"SELECT {_CLOCK_MS}")
_ROW = select(TENURE)
_ROW_AND_CLOCK = select(TENURE, literal_column(_CLOCK_MS))
_NUMBER = select(TENURE.c.number).with_for_update(read=True, key_share=True)
"""FOR KEY SHARE: a renewal does not wait for it, a claim (FOR UPDATE) does."""
_FENCE = _NUMBER.add_columns(
    func.set_config("idle_in_transaction_session_timeout", str(_IDLE_MS), True)
)
# Keyed by schema: coordinators may share a database when each has a schema of its own.
_KEY = "hashtextextended('hypergpu journal ' || current_schema(), 0)"
_LOCK = text(f"SELECT pg_advisory_lock({_KEY})")
_UNLOCK = text(f"SELECT pg_advisory_unlock({_KEY})")
Lost = Callable[[str], None]


def boot_ms() -> Milliseconds:
    """Time since this machine started, with the time that it slept."""
    return Milliseconds(time.clock_gettime_ns(_CLOCK) // 1_000_000)


@contextmanager
def one_at_a_time(connection: Connection) -> Iterator[None]:
    """Let nobody else make tables in this schema meanwhile."""
    connection.execute(_LOCK)
    connection.commit()
    try:
        yield
    finally:
        connection.execute(_UNLOCK)
        connection.commit()


def prepare_tenure(connection: Connection) -> None:
    """Make its row where there is none."""
    with connection.begin():
        if connection.execute(_ROW).one_or_none() is None:
            connection.execute(insert(TENURE), _values(NOBODY))


class TakenTenure(NamedTuple):
    """A tenure and its story."""

    tenure: Tenure
    takeover: str
    """Sentence on who drove before; empty: there is nothing to tell."""
    follows_another: bool
    """Whether another coordinator drove before."""


def take_tenure(connection: Connection, claimant: Claimant) -> TakenTenure | Tenure:
    """Take the tenure if it is free; else the one that another coordinator holds."""
    with connection.begin():
        # Looked at without a lock first: who drives must not wait for those who look.
        stored_tenure = Tenure(*connection.execute(_ROW).one())
        if next_tenure(stored_tenure, claimant, _database_ms(connection)) is None:
            return stored_tenure
    try:
        with connection.begin():
            return _lock_and_take(connection, claimant)
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) != _LOCK_TIMEOUT:
            raise
        return stored_tenure


def _lock_and_take(connection: Connection, claimant: Claimant) -> TakenTenure | Tenure:
    connection.execute(text(f"SET LOCAL lock_timeout = {_LOCK_MS}"))
    stored_tenure = Tenure(*connection.execute(_ROW.with_for_update()).one())
    now_ms = _database_ms(connection)
    new_tenure = next_tenure(stored_tenure, claimant, now_ms)
    if new_tenure is None:
        return stored_tenure
    connection.execute(update(TENURE).values(**_values(new_tenure)))
    follows_another = bool(stored_tenure.number) and stored_tenure.holder != claimant.name
    return TakenTenure(new_tenure, takeover_text(stored_tenure, claimant, now_ms), follows_another)


def _values(tenure: Tenure) -> dict[str, object]:
    return {name: getattr(tenure, name) for name in tenure.__struct_fields__}


def _database_ms(connection: Connection) -> Milliseconds:
    return Milliseconds(int(connection.execute(_NOW_MS).scalar_one()))


class TenureClaim(NamedTuple):
    """A claimant, and what it does while another coordinator drives."""

    claimant: Claimant
    wait: Callable[[Tenure], None]
    """Returns when it is to be tried again, or raises."""


def refuse_to_wait(held: Tenure) -> None:
    """Raise `JournalLockedError`, which names who drives."""
    raise JournalLockedError(
        f"the journal is in use by the coordinator at {held.address}: stop that one, or let this"
        " one wait for its end (--takeover), or give it a database or a schema of its own"
    )


def nameless_claim() -> TenureClaim:
    """The claim of somebody who has no folder and does not wait."""
    name, address = secrets.token_hex(8), "an address that it did not tell"
    somebody = Claimant(name, address, ALONE_MS, is_alone=True)
    return TenureClaim(somebody, refuse_to_wait)


class HeldTenure:
    """A tenure that this process has taken: renews it until it is given back or lost."""

    def __init__(
        self, engine: Engine, taken: TakenTenure, asked_ms: Milliseconds, *, is_alone: bool = False
    ) -> None:
        """Begin to renew.

        Args:
            engine: Connections of its own: nothing else waits in them.
            taken: As it was taken.
            asked_ms: `boot_ms` from before it was asked for.
            is_alone: See `Claimant`.
        """
        tenure, self.takeover, self.follows_another = taken
        self.number = tenure.number
        self._tenure = tenure
        self._engine = engine
        self._is_alone = is_alone
        self._until_ms = given_up_ms(asked_ms, tenure.length_ms)
        self._is_over = threading.Event()
        self._renewing = threading.Lock()
        self._loss = ""
        self._on_loss: Lost = lambda _: None
        watches = () if is_alone else (self._watch_clock,)
        for work in (self._keep_renewing, *watches):
            threading.Thread(target=work, name="tenure", daemon=True).start()

    def tell(self, on_loss: Lost) -> None:
        """Have the loss of it told, with the reason, by a thread of its own."""
        self._on_loss = on_loss
        if self._loss:
            on_loss(self._loss)

    def check(self) -> None:
        """Refuse once it may be another's, by this machine's clock alone.

        Raises:
            TenureLostError: It may be.
        """
        if not self._is_alone:
            self._look_at_clock()
        if self._loss:
            raise TenureLostError(self._loss)

    def wait(self, seconds: float) -> None:
        """Wait so long, or until it is lost."""
        self._is_over.wait(seconds)

    def fence(self, connection: Connection) -> None:
        """Refuse a transaction unless this tenure is the newest, and see that it stays so until
        the transaction ends.

        Raises:
            TenureLostError: Another coordinator drives, or may.
        """
        self.check()
        number = connection.scalar(_NUMBER if self._is_alone else _FENCE)
        if number != self.number:
            self._lose(f"it wrote under tenure {self.number}, and {number} is the newest")
            self.check()

    def release(self) -> None:
        """Give it back, so that nobody has to wait for its end."""
        is_held = not self._is_over.is_set()
        self._is_over.set()
        # A renewal that is under way has a connection, which would stay open.
        with self._renewing:
            try:
                with self._engine.begin() as connection:
                    if is_held:
                        own_row = TENURE.c.number == self.number
                        connection.execute(update(TENURE).where(own_row).values(until_ms=0))
            except DBAPIError as error:
                log.warning("the tenure was not given back", reason=str(error.orig))
            self._engine.dispose()

    def _keep_renewing(self) -> None:
        while not self._is_over.wait(self._tenure.length_ms / _RENEWALS / 1000):
            asked_ms = boot_ms()
            try:
                if not self._renew():
                    return self._lose("another coordinator has taken over")
            except DBAPIError as error:
                log.warning("the tenure is not renewed yet", reason=str(error.orig))
            else:
                self._until_ms = given_up_ms(asked_ms, self._tenure.length_ms)
        return None

    def _renew(self) -> bool:
        """Renew it, unless it is over; false: another coordinator drives."""
        with self._renewing:
            # Once it is given back, the connection would stay open.
            return self._is_over.is_set() or self._renew_now()

    def _renew_now(self) -> bool:
        """Two statements without a transaction: a busy server must not take long for it."""
        with self._engine.connect() as connection:
            *row, now_ms = connection.execute(_ROW_AND_CLOCK).one()
            until_ms = renewed_until_ms(Tenure(*row), self.number, Milliseconds(now_ms))
            if until_ms is None:
                return False
            change = update(TENURE).where(TENURE.c.number == self.number)
            return connection.execute(change.values(until_ms=until_ms)).rowcount == 1

    def _watch_clock(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self._look_at_clock()

    def _look_at_clock(self) -> None:
        if boot_ms() >= self._until_ms:
            self._lose(f"tenure {self.number} ran out: the database did not renew it in time")

    def _lose(self, why: str) -> None:
        if not self._loss:
            self._loss = why
            self._is_over.set()
            self._on_loss(why)
