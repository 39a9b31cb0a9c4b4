"""What a training keeps on disk: its folder, checkpoints and log, and reading them back."""
