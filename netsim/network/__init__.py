"""A whole network: profiles and world files describe one, backends open one for programs."""
