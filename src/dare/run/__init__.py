"""A plan carried out."""
