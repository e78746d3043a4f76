// Sums of products in a fixed order, and products of low rank.
