"""The daemon of one machine that trains, and its worker process."""
