"""Shared by all users of LMDB: a typed cursor, and a check of a file's pages before LMDB opens it."""
