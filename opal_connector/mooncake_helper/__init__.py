"""The process with Mooncake's library. Loads nothing else of this package: it starts often."""
