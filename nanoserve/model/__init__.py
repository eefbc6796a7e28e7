"""Tensors: the only folder that imports torch. ``build`` is its one doorway."""

import os

# libgomp's threads spin at a barrier while a sibling waits for its core: beside any other busy process a step takes ten
# times as long (measured: 141 ms instead of 14). Read once, when torch loads libgomp; a user's own choice wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
