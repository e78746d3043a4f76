"""Delta files: a fine-tune stored as what it changes, and put back."""
