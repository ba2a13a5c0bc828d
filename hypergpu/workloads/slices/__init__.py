"""Runs of layers of any decoder of transformers, each computed by itself."""
