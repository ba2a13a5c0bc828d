"""Receipts, epochs, and transactions that are signed before they are sent."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables of pay."""
    _make_receipt_tables()
    _make_outbox_tables()


def downgrade() -> None:
    """Refuse: what was earned and sent is not thrown away by a tool."""
    raise NotImplementedError("restore the backup that was made before the upgrade")


def _make_receipt_tables() -> None:
    op.create_table(
        "receipts",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("round", sa.BigInteger, nullable=False),
        sa.Column("samples", sa.BigInteger, nullable=False),
        sa.Column("quality_bps", sa.BigInteger, nullable=False),
        sa.Column("leaf", sa.LargeBinary, nullable=False),
        sa.Column("contribution", sa.LargeBinary, nullable=False),
        sa.Column("body_json", sa.LargeBinary, nullable=False),
    )
    op.create_index("receipts_by_epoch", "receipts", ["job_id", "epoch"])
    op.create_table(
        "receipt_counts",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("node", sa.String, primary_key=True),
        sa.Column("kept", sa.BigInteger, nullable=False),
        sa.Column("sealed", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "epochs",
        sa.Column("job_id", sa.String, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("is_left", sa.Boolean, nullable=False),
        sa.Column("is_last", sa.Boolean, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("body_json", sa.LargeBinary, nullable=False),
    )


def _make_outbox_tables() -> None:
    op.create_table(
        "transactions",
        *_account_columns(),
        sa.Column("purpose", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("is_sent", sa.Boolean, nullable=False),
        sa.Column("block_number", sa.BigInteger, nullable=True),
        sa.Column("block_hash", sa.LargeBinary, nullable=True),
        sa.Column("mined_ms", sa.BigInteger, nullable=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index(
        "transactions_by_purpose", "transactions", ["chain_id", "address", "purpose"], unique=True
    )
    op.create_index("transactions_by_state", "transactions", ["chain_id", "address", "state"])
    op.create_table(
        "attempts",
        *_account_columns(),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "batches",
        *_account_columns(),
        sa.Column("job_id", sa.String, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=True),
        sa.Column("body_json", sa.LargeBinary, nullable=False),
    )
    op.create_index("batches_by_job", "batches", ["job_id"])


def _account_columns() -> "list[sa.Column[object]]":
    return [
        sa.Column("chain_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("address", sa.String, primary_key=True),
        sa.Column("nonce", sa.BigInteger, primary_key=True, autoincrement=False),
    ]
