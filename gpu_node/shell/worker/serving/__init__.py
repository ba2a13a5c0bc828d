"""A served model in the worker: it is loaded once and answers calls until its lease is void."""
