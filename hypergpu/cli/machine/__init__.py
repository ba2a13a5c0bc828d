"""This machine: the programs started on it, and whether it is fit for them."""
