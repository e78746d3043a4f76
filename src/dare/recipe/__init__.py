"""Recipes: the requests of users."""
