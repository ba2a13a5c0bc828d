"""Measurements of what grows past one machine."""
