"""The table of the kinds of work that this coordinator drives."""
