"""Experiments that are not in the paper."""
