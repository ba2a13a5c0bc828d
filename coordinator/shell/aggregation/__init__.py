"""Folds updates from disk into the next model, in slot order and in flat memory."""
