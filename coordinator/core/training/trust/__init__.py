"""How far the updates of a round are believed: weights, noise, duplicates and quality."""
