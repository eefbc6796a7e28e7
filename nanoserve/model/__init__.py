"""TENSORS. The only folder that imports torch; ``build`` is its doorway, ``folder`` and ``info`` stay torch-free."""
