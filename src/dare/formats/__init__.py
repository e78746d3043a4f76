"""Formats of outputs: one file for each that is not plain safetensors."""
