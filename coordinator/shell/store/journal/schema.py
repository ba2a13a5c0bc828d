"""Tables of a journal, and the check at start that this code is written for them."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    insert,
    inspect,
    select,
)
from sqlalchemy.engine import Connection

from coordinator.shell.store.journal.records import JournalVersionError

SCHEMA_VERSION = 2
METADATA = MetaData()

# One row. Commits: SQLite drops a damaged tail of its write-ahead log without a word, and the
# witness file beside the database remembers how many transactions there were.
JOURNAL = Table(
    "journal",
    METADATA,
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    Column("commits", BigInteger, nullable=False),
)

# SQLite keeps these rows in order of writing: a file that was cut off has lost the newest.
ENTRIES = Table(
    "entries",
    METADATA,
    Column("job_id", String, primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("kind", String, nullable=False),
    Column("body_json", LargeBinary, nullable=False),
    Column("chain", LargeBinary, nullable=False),
)

# Where each job's chain ends: tells a tail that was cut off from one that was never written.
JOBS = Table(
    "jobs",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("job_id", String, nullable=False, unique=True),
    Column("last_sequence", BigInteger, nullable=False),
    Column("last_chain", LargeBinary, nullable=False),
)

SNAPSHOTS = Table(
    "snapshots",
    METADATA,
    Column("job_id", String, primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("chain", LargeBinary, nullable=False),
    Column("state_json", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False),
)

REQUESTS = Table(
    "requests",
    METADATA,
    Column("request_id", String, primary_key=True),
    Column("job_id", String, nullable=False, index=True),
    Column("fingerprint", String, nullable=False),
)

NONCES = Table(
    "nonces",
    METADATA,
    Column("node", String, primary_key=True),
    Column("nonce", BigInteger, nullable=False),
)

NODES = Table(
    "nodes",
    METADATA,
    Column("node", String, primary_key=True),
    Column("public_key", LargeBinary, nullable=False),
    Column("capabilities_json", LargeBinary, nullable=False),
    Column("software", String, nullable=False),
    Column("first_seen_ms", BigInteger, nullable=False),
    Column("last_seen_ms", BigInteger, nullable=False),
    Column("is_revoked", Boolean, nullable=False),
    Column("updates_accepted", BigInteger, nullable=False),
    Column("updates_rejected", BigInteger, nullable=False),
)

# Nodes that take no work until somebody resumes them.
PAUSES = Table(
    "pauses",
    METADATA,
    Column("node", String, primary_key=True),
    Column("reason", String, nullable=False),
)

# Labels that operators gave nodes, which no node states itself.
TRUST_LABELS = Table(
    "trust_labels",
    METADATA,
    Column("node", String, primary_key=True),
    Column("label", String, primary_key=True),
)

# Health of nodes, a bounded record each: `coordinator.core.hub.health`.
HEALTH = Table(
    "health",
    METADATA,
    Column("node", String, primary_key=True),
    Column("record_json", LargeBinary, nullable=False),
)

# Speeds of nodes, a bounded record each: `coordinator.core.network.known_speed`.
SPEEDS = Table(
    "speeds",
    METADATA,
    Column("node", String, primary_key=True),
    Column("record_json", LargeBinary, nullable=False),
)

TOKENS = Table(
    "tokens",
    METADATA,
    Column("token_id", String, primary_key=True),
    Column("role", String, nullable=False),
    Column("label", String, nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    Column("created_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False),
    Column("uses_left", BigInteger, nullable=True),
    Column("is_revoked", Boolean, nullable=False),
)

# Which node took a use of which token.
JOINS = Table(
    "joins",
    METADATA,
    Column("token_id", String, primary_key=True),
    Column("node", String, primary_key=True),
)

# Keys by which users sign what they order.
SPEC_KEYS = Table(
    "spec_keys",
    METADATA,
    Column("public_key", LargeBinary, primary_key=True),
    Column("token_id", String, nullable=False),
    Column("label", String, nullable=False),
    Column("registered_ms", BigInteger, nullable=False),
    Column("state", String, nullable=False),
)

# One row: which coordinator drives the jobs of a database on a server, and until when.
TENURE = Table(
    "tenure",
    METADATA,
    Column("number", BigInteger, nullable=False),
    Column("holder", String, nullable=False),
    Column("address", String, nullable=False),
    Column("until_ms", BigInteger, nullable=False),
    Column("length_ms", BigInteger, nullable=False),
)

# Coordinators that may drive, and where they are found.
COORDINATORS = Table(
    "coordinators",
    METADATA,
    Column("name", String, primary_key=True),
    Column("address", String, nullable=False),
    Column("node_address", String, nullable=False),
    Column("started_ms", BigInteger, nullable=False),
)

# Files of the coordinator's folder that one which takes over needs, sealed.
SECRETS = Table(
    "secrets",
    METADATA,
    Column("name", String, primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
)


def prepare_tables(connection: Connection, where: str) -> None:
    """Make the tables in an empty database, and check the version of others.

    Raises:
        JournalVersionError: another version of hypergpu wrote the journal; nothing was touched.
    """
    with connection.begin():
        tables = inspect(connection).get_table_names()
        if JOURNAL.name not in tables and ENTRIES.name not in tables:
            METADATA.create_all(connection)
            connection.execute(insert(JOURNAL), {"version": SCHEMA_VERSION, "commits": 0})
            return
        schema_version = (
            connection.scalar(select(JOURNAL.c.version)) if JOURNAL.name in tables else 0
        )
        if schema_version == SCHEMA_VERSION:
            # Tables that came after the first of this version are added to those it has.
            METADATA.create_all(connection)
            return
        age, fix = "a newer", "upgrade this one: pip install --upgrade hypergpu"
        if schema_version is None or schema_version < SCHEMA_VERSION:
            age, fix = "an older", "go on with that version, or use another folder"
        raise JournalVersionError(
            f"{age} hypergpu wrote the journal at {where} (schema {schema_version}, this one reads"
            f" {SCHEMA_VERSION}): {fix}"
        )
