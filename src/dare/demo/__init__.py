"""The demonstration: three small models that were really trained, merged, and scored.

The models are in `models`, what they can do is in `tasks`, and `training/` in the repository says
how they were made.
"""
