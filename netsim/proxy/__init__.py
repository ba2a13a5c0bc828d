"""User-space forwarding on loopback: any Linux machine, no root; TCP is timed by a model."""
