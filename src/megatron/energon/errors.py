"""Errors in samples, and what is done about them."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.errors": [
            "FatalSampleError",
            "SYSTEM_EXCEPTIONS",
            ("SampleException", "SampleError"),
            "SkipSample",
        ],
        "energon.stages.error_context": [
            "ErrorContext",
            "handle_restore_errors",
        ],
        "energon.stages.hook": [
            "log_exception",
            "reraise_exception",
        ],
    },
)
