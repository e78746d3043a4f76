"""What is written, and what is said of it."""
