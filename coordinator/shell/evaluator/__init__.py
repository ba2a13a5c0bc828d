"""The spawned process that makes initial models and measures them on held-out data."""
