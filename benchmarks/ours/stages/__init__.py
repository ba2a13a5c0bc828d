"""Rings of stages: their machine in virtual time, and real ones."""
