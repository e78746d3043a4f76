// Magnitudes of a delta, counted and collected, so that the k-th is found in a pass.
