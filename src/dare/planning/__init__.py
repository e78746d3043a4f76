"""What will be done, from headers alone: every tensor, byte and cost."""
