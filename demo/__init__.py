"""The bundled demo model: its data, its training and its measure."""

import os

# Every padded shape of a batch is a primitive of its own to oneDNN; its cache of 1,024 is too small for a training.
# Read when torch first multiplies, so it stands here and not behind torch's import.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
