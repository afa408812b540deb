"""The paged key/value cache: block accounting (no tensors) and the tensors behind it."""
