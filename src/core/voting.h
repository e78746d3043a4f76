// Other ways to combine than sums and elections.
