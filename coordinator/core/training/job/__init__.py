"""One training run as pure values: its state, events and commands."""
