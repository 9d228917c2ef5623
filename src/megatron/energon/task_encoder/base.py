"""The user's hooks."""

from megatron.energon._alias import alias

__getattr__, __dir__, __all__ = alias(
    __name__,
    {
        "energon.samples.collate": [
            "batch_list",
            "batch_pad_stack",
            "batch_stack",
            "generic_batch",
        ],
        "energon.samples.sample": [
            "Batch",
        ],
        "energon.task_encoder.augment": [
            "AugmentTaskEncoder",
        ],
        "energon.task_encoder.cooker": [
            "stateless",
        ],
        "energon.task_encoder.encoder": [
            "DefaultTaskEncoder",
            "TaskEncoder",
        ],
    },
)
