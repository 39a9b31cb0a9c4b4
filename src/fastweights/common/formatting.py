"""Numbers as people read them."""

import math


def format_seconds(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_loss(value: float | None) -> str:
    """Return a loss with four digits behind the point, or two in all where it is tiny."""
    return "NaN" if value is None or math.isnan(value) else f"{value:.4f}" if value >= 0.0001 else f"{value:.1e}"


def format_number(value: object) -> str:
    """Return a value as people read it: four digits of a fraction, whole numbers in groups of three."""
    if isinstance(value, bool | str) or (isinstance(value, int) and abs(value) < 10_000):
        return str(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "NaN"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == 0 else f"{value:.4g}"
