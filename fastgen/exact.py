"""Exceptions shared by the modules that decide between the paged path and the original one."""


class NotExact(Exception):
    """The paged path cannot do this exactly; the message says why. Raised before anything has run."""
