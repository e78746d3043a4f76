"""Ways to carry out the tasks of a merge: threads of this process."""
