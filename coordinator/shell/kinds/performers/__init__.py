"""What the performers of all kinds of work are made of."""
