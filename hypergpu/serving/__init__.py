"""A model that answers requests, on nodes that hold it."""
