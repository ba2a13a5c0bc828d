"""Measures open links of any backend, and judges whether the backend kept its times."""
