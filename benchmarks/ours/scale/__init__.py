"""Measures what grows past one machine."""
