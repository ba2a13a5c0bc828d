"""The daemon's loop, and the daemons of one machine."""
