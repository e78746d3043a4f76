"""Tensors as bytes: types, headers, files, digests, chunks, masks."""
