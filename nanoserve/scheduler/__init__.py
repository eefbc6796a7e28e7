"""Who runs, on which blocks: pure Python, no tensors, no threads, no clock of its own."""
