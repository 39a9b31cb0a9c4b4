"""What each kind of model is trained on, and how it is scored."""
