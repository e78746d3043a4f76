"""What deltas look like."""
