"""The journal's schema, step by step. Run at start, on the connection that holds the lock."""
