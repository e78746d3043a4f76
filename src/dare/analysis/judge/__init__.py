"""The meaning of the figures: readiness and advice, by rules and limits in tables."""
