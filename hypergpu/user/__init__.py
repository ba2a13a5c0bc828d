"""The user's side: command line, client, training of one's own models; no process stands on it."""
