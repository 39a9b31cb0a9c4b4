"""The training loop: everything that is the same for every model."""
