"""gistkit: train networks in a fraction of the activation memory."""
