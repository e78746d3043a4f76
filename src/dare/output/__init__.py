"""Outputs: writing, publishing, describing and verifying them."""
