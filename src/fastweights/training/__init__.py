"""Training the models."""
