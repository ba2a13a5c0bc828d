"""Drives jobs of every kind: decides over events, persists them, and performs what they command."""
