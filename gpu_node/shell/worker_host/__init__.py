"""The daemon's side of the worker: its process, its sandbox and the files laid out for it."""
