"""A bench that judges anybody's function of this family of recurrences by float64: hard cases, tolerances, verdicts."""
