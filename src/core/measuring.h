// The tallies of an analysis.
