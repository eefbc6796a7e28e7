"""Slow, obvious versions of fast things."""
