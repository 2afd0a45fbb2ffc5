"""The exception tree: whose fault an error is decides who hears of it.

Knows nothing else. Every exception that Netra raises on purpose is one of these, so the engine can
answer the client (RequestError), refuse to start (ConfigError) or declare itself unhealthy (EngineError).
"""


class NetraError(Exception):
    """Root of the tree; never raised itself."""


class ConfigError(NetraError):
    """The deployment is wrong: a knob, a checkpoint, or memory that does not suffice."""


class RequestError(NetraError):
    """The client's fault, or a limit it ran into. Answered to that client alone; the engine goes on.

    `code` is machine-readable (`invalid_request`, `unknown_parameter`, `prompt_too_long`,
    `queue_full`, `cancelled`, `timeout`, `shutting_down`) and leads the message that the client receives.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"[{code}] {message}")
        self.code = code
        self.message = message


class EngineError(NetraError):
    """Our fault: live requests are failed once, and the model is reported unhealthy."""
