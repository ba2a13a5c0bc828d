"""The commands' arguments. Each body imports what it needs, so that ``--help`` imports nothing."""
