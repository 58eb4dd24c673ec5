"""The layer benchmark: encodings, fused operators and their rivals, each checked bit for bit before it is timed."""
