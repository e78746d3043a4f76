// XXH3-128 of many pieces of memory in one call.
