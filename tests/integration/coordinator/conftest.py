"""What needs a PostgreSQL is left out where there is none."""

from tests.conformance.journal_stores import POSTGRES_URL

collect_ignore = [] if POSTGRES_URL else ["test_faults.py", "test_takeover.py"]
