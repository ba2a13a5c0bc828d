"""Decisions of the coordinator: pure functions on frozen values, without clock, chance or IO."""
