"""The parts that networks are made of. Each can be built and run alone in a plain test."""
