"""Measurements of speed and memory, each against a rival in the same run."""
