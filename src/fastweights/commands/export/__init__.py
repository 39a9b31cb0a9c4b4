"""`fastweights export`: a trained model for others to use, one module for each form it may have."""
