"""Who may speak: the coordinator's own certificate authority, tokens, and the rate of guesses."""
