"""Fused operations. ``plain`` writes each one in torch alone; a faster source for one device lies beside it."""
