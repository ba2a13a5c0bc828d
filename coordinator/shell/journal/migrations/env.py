"""Alembic's entry: runs the migrations on the connection that the journal hands over."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
