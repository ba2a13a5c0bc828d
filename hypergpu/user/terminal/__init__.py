"""Output on a terminal for every command line of the project: tables, JSON, errors, progress."""
