"""Brings a journal's schema up to this code's, at start, in one transaction."""

from pathlib import Path

from sqlalchemy import inspect, text
from sqlalchemy.engine import Connection

from coordinator.shell.journal.records import JournalTooNewError, JournalTooOldError
from coordinator.shell.journal.sql.tables import SCHEMA_REVISION

_FIRST_REVISION = "1001"
_MIGRATIONS = Path(__file__).parent.parent / "migrations"


def upgrade(connection: Connection, where: str) -> None:
    """Run the missing migrations. A journal that is up to date costs one query.

    Raises:
        JournalTooNewError: a newer hypergpu has been here; nothing was touched.
        JournalTooOldError: a hypergpu of before protocol 3 has; nothing was touched.
    """
    with connection.begin():
        found = _revision(connection)
        if found == SCHEMA_REVISION:
            return
        if found is not None and found > SCHEMA_REVISION:
            raise JournalTooNewError(
                f"a newer hypergpu wrote the journal at {where} (schema {found}, this one knows "
                f"{SCHEMA_REVISION}). Upgrade this one: pip install --upgrade hypergpu"
            )
        if found is not None and found < _FIRST_REVISION:
            raise JournalTooOldError(
                f"a hypergpu of before protocol 3 wrote the journal at {where} (schema {found}),"
                " which this one does not read: go on with that version, or use another folder"
            )
        _run(connection)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.scalar(text("SELECT version_num FROM alembic_version"))
    return revision


def _run(connection: Connection) -> None:
    # Imported here: a start with nothing to migrate must not pay for it.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, SCHEMA_REVISION)
