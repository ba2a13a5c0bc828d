"""Tables of the dashboard's own history: what the feed's state does not hold any more."""

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

METADATA = MetaData()
VERSION = 1

VERSIONS = Table("dashboard_versions", METADATA, Column("version", Integer, primary_key=True))
JOBS = Table(
    "dashboard_jobs",
    METADATA,
    Column("job", String(64), primary_key=True),
    # The first sequence number of the job's journal that is not in here.
    Column("next_sequence", BigInteger, nullable=False),
)
ANCHORS = Table(
    "dashboard_anchors",
    METADATA,
    Column("job", String(64), primary_key=True),
    Column("from_job_ms", BigInteger, primary_key=True),
    Column("distance_ms", BigInteger, nullable=False),
)
EVENTS = Table(
    "dashboard_events",
    METADATA,
    Column("job", String(64), primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("at_ms", BigInteger, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("node", String(64)),
    Column("round", BigInteger),
    Column("text", Text, nullable=False),
)
ROUNDS = Table(
    "dashboard_rounds",
    METADATA,
    Column("job", String(64), primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("body", LargeBinary, nullable=False),
)
POINTS = Table(
    "dashboard_points",
    METADATA,
    # "job/ID" or "node/ID".
    Column("scope", String(80), primary_key=True),
    Column("name", String(40), primary_key=True),
    Column("level", Integer, primary_key=True),
    Column("number", BigInteger, primary_key=True),
    Column("at_ms", BigInteger, nullable=False),
    Column("moved_bytes", BigInteger, nullable=False),
    Column("round", BigInteger, nullable=False),
    Column("least", Float, nullable=False),
    Column("greatest", Float, nullable=False),
    Column("total", Float, nullable=False),
    Column("count", BigInteger, nullable=False),
)
SESSIONS = Table(
    "dashboard_sessions",
    METADATA,
    # Digest of the cookie, which is also the key of the sealed token.
    Column("digest", String(64), primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
    Column("ends_at_ms", BigInteger, nullable=False),
)
AUDIT = Table(
    "dashboard_audit",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("at_ms", BigInteger, nullable=False),
    Column("token", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("action", String(200), nullable=False),
    Column("outcome", Text, nullable=False),
)
