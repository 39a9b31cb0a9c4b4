"""Losses of a softmax over many words."""
