"""Bytes by digest: models, updates, users' data. Each is served whole and right, or not at all."""
