"""Where each number of README and docs is from: `tests/test_numbers.py` compares them."""
