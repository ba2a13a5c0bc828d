"""Jobs' rows, heads, snapshots and requests; nodes, nonces, tokens and certificates."""

import sqlalchemy as sa
from alembic import op

revision = "1001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make every table of the first version."""
    _make_job_tables()
    _make_registry_tables()
    commits = op.create_table(
        "commits",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    )
    op.bulk_insert(commits, [{"number": 0}])


def downgrade() -> None:
    """Refuse: what a journal remembers is not thrown away by a tool."""
    raise NotImplementedError("restore the backup that was made before the upgrade")


def _make_job_tables() -> None:
    op.create_table(
        "entries",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("body_json", sa.LargeBinary, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("job_id", sa.String, nullable=False, unique=True),
        sa.Column("last_sequence", sa.BigInteger, nullable=False),
        sa.Column("last_chain", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "snapshots",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("state_json", sa.LargeBinary, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "requests",
        sa.Column("request_id", sa.String, primary_key=True),
        sa.Column("job_id", sa.String, nullable=False, index=True),
        sa.Column("fingerprint", sa.String, nullable=False),
    )


def _make_registry_tables() -> None:
    op.create_table(
        "nonces",
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("nonce", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "nodes",
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("public_key", sa.LargeBinary, nullable=False),
        sa.Column("capabilities_json", sa.LargeBinary, nullable=False),
        sa.Column("software", sa.String, nullable=False),
        sa.Column("first_seen_ms", sa.BigInteger, nullable=False),
        sa.Column("last_seen_ms", sa.BigInteger, nullable=False),
        sa.Column("is_revoked", sa.Boolean, nullable=False),
        sa.Column("updates_accepted", sa.BigInteger, nullable=False),
        sa.Column("updates_refused", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.String, primary_key=True),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("label", sa.String, nullable=False),
        sa.Column("secret_hash", sa.LargeBinary, nullable=False),
        sa.Column("created_s", sa.BigInteger, nullable=False),
        sa.Column("expires_s", sa.BigInteger, nullable=False),
        sa.Column("uses_left", sa.BigInteger, nullable=True),
        sa.Column("is_revoked", sa.Boolean, nullable=False),
    )
    op.create_table(
        "joins",
        sa.Column("token_id", sa.String, primary_key=True),
        sa.Column("node", sa.String, primary_key=True),
    )
    op.create_table(
        "certificates",
        sa.Column("serial", sa.String, primary_key=True),
        sa.Column("node", sa.String, nullable=False, index=True),
        sa.Column("issued_s", sa.BigInteger, nullable=False),
        sa.Column("expires_s", sa.BigInteger, nullable=False),
    )
