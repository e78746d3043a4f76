"""Plans, made from headers alone: every tensor, byte and cost."""
