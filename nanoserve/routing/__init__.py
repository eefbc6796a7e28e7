"""Which replica: pure functions over what the feeds tell."""
