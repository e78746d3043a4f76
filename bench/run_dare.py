"""Carry out one recipe: the process that bench/compare.py measures as ours.

Usage: python bench/run_dare.py recipe.toml
"""

from __future__ import annotations

import sys

import dare

if __name__ == "__main__":
    dare.merge(dare.load_recipe(sys.argv[1]), overwrite=True)
