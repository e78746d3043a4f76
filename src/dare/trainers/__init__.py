"""Merges of what a training leaves behind while it runs."""
