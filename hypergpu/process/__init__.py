"""Machinery of every long-lived process: clocks, logs and the memory of bulk messages."""
