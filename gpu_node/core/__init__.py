"""The node's decisions: pure steps from a session and an event to a session and commands."""
