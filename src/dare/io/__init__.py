"""Files: safetensors headers, sources to read from, the output to write to.

This package knows bytes and names, and nothing of methods.
"""
