"""Text as a stream of tokens, for language models."""
