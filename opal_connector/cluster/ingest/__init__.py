"""Feeding an index: what instances publish, followed through losses, restarts and resets."""
