"""Opal inside LMCache. The only room that imports LMCache; importing this package does not."""
