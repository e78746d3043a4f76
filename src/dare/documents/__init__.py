"""Notices and documents: everything the program says, and the three ways in which it is shown."""
