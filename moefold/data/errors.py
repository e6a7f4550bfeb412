"""The error of unusable data."""


class DataError(ValueError):
    """Unusable data; the message names the file, the position in it, and a remedy."""
