"""Performs the commands of the round machine; long ones are tasks that answer with events."""
