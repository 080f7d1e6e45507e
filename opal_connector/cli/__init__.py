"""The `opal` command line: what a person runs by hand. Nothing else in the package imports it."""
