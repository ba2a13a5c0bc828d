"""Mixtures of experts of which each node holds some."""
