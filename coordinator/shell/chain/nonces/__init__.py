"""Who has used the nonces of an account, and which nobody will."""
