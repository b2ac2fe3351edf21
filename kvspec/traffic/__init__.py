"""How much a plan moves: bytes and descriptors by pair of ranks, by rank, and by link."""
