"""Questions about the inputs of a merge, each of which is asked in one place for everybody."""
