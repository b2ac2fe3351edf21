"""What one engine is: its groups of layers, its parallel sizes, and the layout of its cache."""
