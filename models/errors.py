"""The one error of this folder."""


class ModelError(ValueError):
    """A model, or a file of one, that cannot be used: what was given, what was expected, what to do."""
