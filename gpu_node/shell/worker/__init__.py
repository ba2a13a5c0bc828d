"""The spawned process that trains, and the messages it speaks with the daemon."""
