"""Decide, persist, act; who is there; what is left to do after a restart."""
