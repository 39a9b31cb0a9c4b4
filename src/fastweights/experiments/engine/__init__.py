"""What every experiment is made of: cells, claims, a store and a sweep."""
