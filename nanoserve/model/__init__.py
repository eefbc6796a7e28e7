"""Tensors: the only folder that imports torch. ``build`` is its one doorway."""
