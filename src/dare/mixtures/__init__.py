"""Mixtures of experts: several fine-tunes as one model whose layers choose between their MLPs."""
