"""Is it right: checkers that go through what should be there, and not through what came."""
