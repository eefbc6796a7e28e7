"""One small program for each engine that benchmarks.cpu_peers measures; each runs with its own environment's Python.

They import the standard library, the engine they drive and the plain values of this package, nothing else.
"""
