"""Seeded workloads and the commands that measure them; every result is JSON with its command, commit and machine."""
