"""The shape of deltas: measured, judged, shown."""
