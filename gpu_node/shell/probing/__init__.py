"""Measures the line to the coordinator: round trips, losses and goodput."""
