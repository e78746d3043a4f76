"""What the figures mean: readiness and advice, by rules and limits in tables."""
