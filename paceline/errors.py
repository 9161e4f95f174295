"""Every error that Paceline raises on purpose.

    PacelineError
    ├── ConfigError            a flag or option that makes no sense; the process ends with one line
    ├── CheckpointError        a model file missing, truncated, unreadable or of an unknown layout
    ├── EngineDied             the engine process is gone, or never came up
    └── RequestError           one request is refused or fails; carries its HTTP status
        ├── InvalidRequest     400  a field is missing, wrong, or not supported here
        ├── Unauthorized       401
        ├── ModelNotFound      404
        ├── BodyTooLarge       413
        ├── QueueFull          429  with the seconds after which to try again
        └── EngineUnavailable  503  the engine is starting, stopping or dead

Knows nothing of HTTP libraries: `RequestError` holds plain values that the routes put on the wire.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors raised on purpose: the message says what happened and what to do."""


class ConfigError(PacelineError):
    """A flag, option or combination of them that makes no sense."""


class CheckpointError(PacelineError):
    """A model file that is missing, truncated, unreadable or of an unsupported kind."""


class EngineDied(PacelineError):
    """The engine process ended while requests were running, or did not come up."""


class RequestError(PacelineError):
    """One request is refused or fails. `param` names the offending field, if there is one."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"


class ModelNotFound(RequestError):
    status = 404
    type = "invalid_request_error"


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"


class QueueFull(RequestError):
    """The waiting line is full. `retry_after`: seconds after which a new try makes sense."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message, code="queue_full")
        self.retry_after = retry_after


class EngineUnavailable(RequestError):
    status = 503
    type = "server_error"
