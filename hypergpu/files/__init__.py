"""How files are written that must outlive a crash."""
