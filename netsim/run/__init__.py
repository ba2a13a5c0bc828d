"""Runs a world's job, with real programs or in virtual time, and reports on it."""
