"""Training among liars in one process: nodes, attackers and the coordinator's way with updates."""
