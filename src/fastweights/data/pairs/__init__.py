"""Sentence pairs, for translation models."""
