"""Which of a transaction's attempts is in its block, and which epochs were checked once final.

After a higher fee either attempt may be in the block. What was mined before this has no such note;
`OutboxRow.hash` says what it is taken for. An epoch that was final before this has no note of a
check, and stays final as it was.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, and the note to epochs that are final."""
    op.add_column("transactions", sa.Column("mined_hash", sa.LargeBinary, nullable=True))
    connection = op.get_bind()
    epochs = sa.table(
        "epochs",
        sa.column("job_id", sa.String),
        sa.column("number", sa.BigInteger),
        sa.column("state", sa.String),
        sa.column("body_json", sa.LargeBinary),
    )
    for row in connection.execute(sa.select(epochs).where(epochs.c.state == "final")).all():
        body = json.loads(row.body_json)
        body["checked"] = body["payment"]["final"]
        connection.execute(
            sa.update(epochs)
            .where((epochs.c.job_id == row.job_id) & (epochs.c.number == row.number))
            .values(body_json=json.dumps(body, separators=(",", ":")).encode())
        )


def downgrade() -> None:
    """Refuse: what is known of what was sent is not thrown away by a tool."""
    raise NotImplementedError("restore the backup that was made before the upgrade")
