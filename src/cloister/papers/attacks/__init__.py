"""Attacks that our tests and benchmarks replay: they must succeed on what a mode admits to leak, and fail elsewhere."""
