"""Using trained models: text as it comes, in and out."""
