"""Training of drafts: data, losses, steps, checkpoints."""
