"""The tables as the code sees them. Migrations make them; a test holds the two together."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

SCHEMA_REVISION = "1001"
"""The migration this code is written for."""

METADATA = MetaData()

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
    Column("updates_refused", BigInteger, nullable=False),
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

CERTIFICATES = Table(
    "certificates",
    METADATA,
    Column("serial", String, primary_key=True),
    Column("node", String, nullable=False, index=True),
    Column("issued_s", BigInteger, nullable=False),
    Column("expires_s", BigInteger, nullable=False),
)

# How many transactions were committed: SQLite drops a damaged tail of its write-ahead log without a
# word, and the witness file beside the database remembers this number.
COMMITS = Table(
    "commits",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
)
