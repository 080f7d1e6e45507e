"""The cluster as its instances describe it: the index, what feeds it, and who routes by it."""
