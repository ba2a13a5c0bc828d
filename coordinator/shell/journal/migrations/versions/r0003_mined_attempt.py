"""Which of a transaction's attempts is in its block: after a higher fee either may be.

What was mined before this has no such note; `OutboxRow.hash` says what it is taken for.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("transactions", sa.Column("mined_hash", sa.LargeBinary, nullable=True))


def downgrade() -> None:
    """Refuse: what is known of what was sent is not thrown away by a tool."""
    raise NotImplementedError("restore the backup that was made before the upgrade")
