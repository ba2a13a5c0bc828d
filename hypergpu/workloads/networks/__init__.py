"""Everything in the catalogue that imports torch."""
