// What is kept, packed; values in few bits; and into a live model.
