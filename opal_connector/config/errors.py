"""What every part of the configuration raises for a user's mistake."""


class ConfigError(ValueError):
    """A user's mistake in the configuration: the field, what was found, what is allowed."""
