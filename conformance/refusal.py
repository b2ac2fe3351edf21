"""The error with which an adapter reports that a connector refuses a transfer."""


class RefusedError(Exception):
    """The connector refuses the transfer. The message has the connector's own words."""
