"""The journal in SQLite or PostgreSQL."""
