"""Training of draft heads: data, losses, steps, checkpoints. Empty so far."""
