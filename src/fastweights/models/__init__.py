"""Models made of the layers and the memory."""
