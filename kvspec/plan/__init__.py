"""Plan a transfer: derive the edges between two engines and check their exact cover."""
