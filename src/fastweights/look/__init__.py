"""A trained language model's memory as a page: record a text, write one HTML file that replays it."""
