"""One pass over the weights."""
