"""What the models are trained and tested on."""
