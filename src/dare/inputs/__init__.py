"""From the paths in a recipe to sources that fit together."""
